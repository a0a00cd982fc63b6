"""GRPO with a truncated importance correction for the version lag.

Advantage of a rollout in its group (GRPO, DeepSeekMath, arXiv 2402.03300, outcome supervision):

    A = (r - mean(r)) / (std(r) + eps)

Objective over all N trainable tokens of the step, each counting the same (DAPO, arXiv 2503.14476):

    J = 1/N sum_t sg[ min(rho_t, c) * keep_t ] * A_t * pi_theta(t) / sg[pi_theta(t)]
    rho_t = pi_theta(t) / pi_behaviour(t)
    keep_t = 0 if (A_t > 0 and rho_t > 1 + clip_high) or (A_t < 0 and rho_t < 1 - clip_low), else 1

`pi_behaviour` is recorded for every token under the very weights that sampled it. With c infinite
this is the gradient of PPO's clipped surrogate (arXiv 1707.06347), with DAPO's clip-higher. c
truncates the weight as in V-trace (arXiv 1802.01561); PPO leaves it unbounded for A < 0. A step
takes one gradient per batch, so the proximal policy of decoupled PPO (AReaL, arXiv 2505.24298) is
sg[pi_theta], the weights at the beginning of the step: with clip_low and clip_high infinite, J is
its objective with pi_prox / pi_behaviour truncated at c, and needs no second forward pass.
"""
# ruff: noqa: N803, N806 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.algorithm import LossTerms, PolicyTokens
from trainer.config import TrainerConfig

__all__ = ["Grpo", "build"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grpo:
    """Group-relative advantages and the objective above."""

    clip_low: float
    """Stop lowering a token's probability below 1 - clip_low times the behaviour's."""
    clip_high: float
    """Stop raising it above 1 + clip_high times the behaviour's."""
    importance_cap: float
    """c: greatest weight of a token."""
    advantage_epsilon: float
    """eps: keeps groups without variance at 0."""

    def advantages(
        self, rewards_R: NDArray[np.float64], group_ids: Sequence[str]
    ) -> NDArray[np.float64]:
        """Rewards standardised within each group, by the population's standard deviation."""
        _, groups_R = np.unique(np.asarray(group_ids), return_inverse=True)
        sizes_G = np.bincount(groups_R)
        centred_R = rewards_R - (np.bincount(groups_R, rewards_R) / sizes_G)[groups_R]
        deviations_G = np.sqrt(np.bincount(groups_R, centred_R**2) / sizes_G)
        advantages_R: NDArray[np.float64] = centred_R / (
            deviations_G[groups_R] + self.advantage_epsilon
        )
        return advantages_R

    def loss(self, tokens: PolicyTokens) -> LossTerms:
        """-N J of the micro-batch, with the statistics of its ratios."""
        current_BT = tokens.logprobs_BT.detach()
        zero = current_BT.new_zeros(())
        log_ratio_BT = torch.where(
            tokens.loss_mask_BT, current_BT - tokens.behaviour_logprobs_BT, zero
        )
        ratio_BT = log_ratio_BT.exp()
        clipped_BT = self._clipped(ratio_BT, tokens.advantages_BT) & tokens.loss_mask_BT
        kept_BT = tokens.loss_mask_BT & ~clipped_BT
        weight_BT = torch.where(kept_BT, ratio_BT.clamp(max=self.importance_cap), zero)
        gain_BT = weight_BT * tokens.advantages_BT * (tokens.logprobs_BT - current_BT).exp()
        sums = {
            "clip_fraction": clipped_BT.sum(),
            "cap_fraction": (tokens.loss_mask_BT & (ratio_BT > self.importance_cap)).sum(),
            "ratio_mean": (ratio_BT * tokens.loss_mask_BT).sum(),
            "log_ratio_squared_mean": log_ratio_BT.square().sum(),
            "train_rollout_logprob_abs_diff": log_ratio_BT.abs().sum(),
        }
        return LossTerms(loss=-gain_BT.sum(), sums=sums)

    def _clipped(self, ratio_BT: torch.Tensor, advantages_BT: torch.Tensor) -> torch.Tensor:
        raised = (advantages_BT > 0) & (ratio_BT > 1 + self.clip_high)
        lowered = (advantages_BT < 0) & (ratio_BT < 1 - self.clip_low)
        return raised | lowered


def build(config: TrainerConfig) -> Grpo:
    """As configured."""
    return Grpo(
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        importance_cap=config.importance_cap,
        advantage_epsilon=config.advantage_epsilon,
    )
