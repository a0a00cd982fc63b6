"""Importance weights: correct the gradient of tokens sampled by other weights.

Shape suffixes: B rows of a micro-batch, T positions that are predicted.
"""
# ruff: noqa: N803, N806 -- tensors carry shape suffixes

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from trainer.algorithms.terms.policy_gradient import Importance, Ratios
from trainer.config import ImportanceMode, TrainerConfig

__all__ = ["Correction", "TrustRegion"]


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
    """PPO's clip range (arXiv 1707.06347): no gradient that moves a ratio further out of it."""

    low: float
    """The range begins at 1 - low."""
    high: float
    """The range ends at 1 + high."""
    correction: Correction
    """Weights within the range; "none" disables the range too."""

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
        return self.bounded(ratios.ratio_BT, ratios.advantages_BT)

    def bounded(self, ratio_BT: torch.Tensor, advantages_BT: torch.Tensor) -> Importance:
        """Importance of given ratios."""
        corrected = self.correction.bounded(ratio_BT)
        raised_BT = (advantages_BT > 0) & (corrected.ratio_BT > 1 + self.high)
        lowered_BT = (advantages_BT < 0) & (corrected.ratio_BT < 1 - self.low)
        limit_BT = torch.where(raised_BT, 1 + self.high, 1 - self.low).to(ratio_BT.dtype)
        clipped_BT = raised_BT | lowered_BT
        return Importance(
            weight_BT=_where(~clipped_BT, corrected.weight_BT),
            ratio_BT=corrected.ratio_BT,
            value_BT=torch.where(clipped_BT, limit_BT, corrected.weight_BT),
        )


def _where(kept_BT: torch.Tensor, values_BT: torch.Tensor) -> torch.Tensor:
    return torch.where(kept_BT, values_BT, values_BT.new_zeros(()))
