"""Importance weights: correct the gradient of tokens sampled by other weights.

Shape suffixes: B rows of a micro-batch, T positions that are predicted.
"""
# ruff: noqa: N803, N806 -- tensors carry shape suffixes

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from trainer.algorithms.terms.policy_gradient import Importance, Ratios
from trainer.config import ImportanceMode, TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """From rho = pi_theta / pi_behaviour to a weight with bounded variance.

    rho contains both numerical differences between trainer and engine and the weight updates since
    sampling; IcePop was proposed for the former.
    """

    way: ImportanceMode
    """truncate: min(rho, c), as V-trace (arXiv 1802.01561) and truncated importance sampling do.
    mask: rho, and 0 beyond c (masked importance sampling). icepop: rho between `floor` and c, and 0
    outside (IcePop). none: 1, as if the weights in training had sampled everything.
    """
    floor: float
    """Smallest ratio that icepop trains on."""
    cap: float
    """c."""

    @classmethod
    def of(cls, config: TrainerConfig) -> Self:
        """With the settings of `config`."""
        return cls(
            way=config.algorithm.importance,
            floor=config.algorithm.importance_floor,
            cap=config.algorithm.importance_cap,
        )

    def __call__(self, ratios: Ratios) -> Importance:
        """Importance of each token from its own ratio."""
        return self.bounded(ratios.ratio_BT)

    def bounded(self, ratio_BT: torch.Tensor) -> Importance:
        """Importance of given ratios."""
        match self.way:
            case "truncate":
                weight_BT = ratio_BT.clamp(max=self.cap)
            case "mask":
                weight_BT = _where(ratio_BT <= self.cap, ratio_BT)
            case "icepop":
                weight_BT = _where((ratio_BT >= self.floor) & (ratio_BT <= self.cap), ratio_BT)
            case "none":
                weight_BT = ratio_BT = torch.ones_like(ratio_BT)
        return Importance(weight_BT=weight_BT, ratio_BT=ratio_BT, value_BT=weight_BT)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustRegion:
    """PPO's clip range (arXiv 1707.06347): no gradient that moves a ratio further out of it.

    In a step of several updates it is around the proximal policy, that at the start of the step,
    and the correction is for what that policy differs from the one that sampled (decoupled PPO,
    arXiv 2110.00641).
    """

    several_updates: ClassVar[bool] = True
    low: float
    """The range begins at 1 - low."""
    high: float
    """The range ends at 1 + high."""
    correction: Correction
    """Weights within the range; "none" disables the range too."""
    decoupled: bool = False
    """Around the proximal policy also in a step of one update, where it clips nothing."""

    @classmethod
    def of(cls, config: TrainerConfig, *, low: float, high: float) -> Self:
        """With the settings of `config`; `low` and `high` are the algorithm's defaults."""
        return cls(
            low=low if config.algorithm.clip_low is None else config.algorithm.clip_low,
            high=high if config.algorithm.clip_high is None else config.algorithm.clip_high,
            correction=Correction.of(config),
        )

    def __call__(self, ratios: Ratios) -> Importance:
        """Importance of each token from its own ratio."""
        since_BT = ratios.proximal_log_ratio_BT
        if since_BT is not None:
            return self._around_proximal(ratios, since_BT.exp())
        if self.decoupled:
            return self.correction(ratios)
        return self.bounded(ratios.ratio_BT, ratios.advantages_BT)

    def _around_proximal(self, ratios: Ratios, since_BT: torch.Tensor) -> Importance:
        corrected = self.correction.bounded(ratios.ratio_BT / since_BT)
        clipped_BT, limit_BT = self._clipped(since_BT, ratios.advantages_BT)
        weight_BT = corrected.weight_BT
        return Importance(
            weight_BT=_where(~clipped_BT, weight_BT * since_BT),
            ratio_BT=corrected.ratio_BT * since_BT,
            value_BT=weight_BT * torch.where(clipped_BT, limit_BT, since_BT),
        )

    def _clipped(
        self, ratio_BT: torch.Tensor, advantages_BT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a ratio is out of the range on the side that its advantage raises; the limits."""
        raised_BT = (advantages_BT > 0) & (ratio_BT > 1 + self.high)
        lowered_BT = (advantages_BT < 0) & (ratio_BT < 1 - self.low)
        limit_BT = torch.where(raised_BT, 1 + self.high, 1 - self.low).to(ratio_BT.dtype)
        return raised_BT | lowered_BT, limit_BT

    def bounded(self, ratio_BT: torch.Tensor, advantages_BT: torch.Tensor) -> Importance:
        """Importance of given ratios."""
        corrected = self.correction.bounded(ratio_BT)
        clipped_BT, limit_BT = self._clipped(corrected.ratio_BT, advantages_BT)
        return Importance(
            weight_BT=_where(~clipped_BT, corrected.weight_BT),
            ratio_BT=corrected.ratio_BT,
            value_BT=torch.where(clipped_BT, limit_BT, corrected.weight_BT),
        )


def _where(kept_BT: torch.Tensor, values_BT: torch.Tensor) -> torch.Tensor:
    return torch.where(kept_BT, values_BT, values_BT.new_zeros(()))
