"""What a token's gradient is multiplied by, since other weights sampled it.

Shape suffixes: B rows of a micro-batch, T positions that are predicted.
"""
# ruff: noqa: N803, N806 -- tensors carry shape suffixes

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from trainer.algorithms.policy_gradient import Ratios
from trainer.config import Importance, TrainerConfig

__all__ = ["Correction", "TrustRegion"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """From rho = pi_theta / pi_behaviour to a weight with bounded variance."""

    way: Importance
    """truncate: min(rho, c), as V-trace (arXiv 1802.01561) and truncated importance sampling do.
    mask: rho, and 0 beyond c (masked importance sampling). icepop: rho between `floor` and c, and 0
    outside (IcePop). none: 1, as if the weights in training had sampled everything.
    """
    floor: float
    """Least ratio that icepop trains on."""
    cap: float
    """c."""

    @classmethod
    def of(cls, config: TrainerConfig) -> Self:
        """As configured."""
        return cls(way=config.importance, floor=config.importance_floor, cap=config.importance_cap)

    def __call__(self, ratios: Ratios) -> torch.Tensor:
        """[B, T]: the weight of each token by its own ratio."""
        return self.weight(ratios.ratio_BT)

    def weight(self, ratio_BT: torch.Tensor) -> torch.Tensor:
        """[B, T]."""
        zero = ratio_BT.new_zeros(())
        match self.way:
            case "truncate":
                return ratio_BT.clamp(max=self.cap)
            case "mask":
                return torch.where(ratio_BT <= self.cap, ratio_BT, zero)
            case "icepop":
                within_BT = (ratio_BT >= self.floor) & (ratio_BT <= self.cap)
                return torch.where(within_BT, ratio_BT, zero)
            case "none":
                return torch.ones_like(ratio_BT)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustRegion:
    """PPO's: no push further away from the behaviour than the clip range (arXiv 1707.06347)."""

    low: float
    """No token is made less likely below 1 - low times what it was."""
    high: float
    """Nor more likely above 1 + high times."""
    correction: Correction
    """Within it."""

    @classmethod
    def of(cls, config: TrainerConfig) -> Self:
        """As configured."""
        return cls(low=config.clip_low, high=config.clip_high, correction=Correction.of(config))

    def __call__(self, ratios: Ratios) -> torch.Tensor:
        """[B, T]: the weight of each token by its own ratio."""
        return self.weight(ratios.ratio_BT, ratios.advantages_BT)

    def weight(self, ratio_BT: torch.Tensor, advantages_BT: torch.Tensor) -> torch.Tensor:
        """[B, T]."""
        weight_BT = self.correction.weight(ratio_BT)
        if self.correction.way == "none":
            return weight_BT  # as if nothing had moved since
        raised_BT = (advantages_BT > 0) & (ratio_BT > 1 + self.high)
        lowered_BT = (advantages_BT < 0) & (ratio_BT < 1 - self.low)
        return torch.where(raised_BT | lowered_BT, ratio_BT.new_zeros(()), weight_BT)
