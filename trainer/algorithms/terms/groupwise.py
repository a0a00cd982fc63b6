"""Objectives that compare the whole rollouts of a group (DPO, TBA).

Shape suffixes: B rows of a micro-batch, T positions that are predicted, R rollouts of the
micro-batch, G groups of it.
"""
# ruff: noqa: N803, N806, N815 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.algorithms.base import LossTerms, PolicyTokens, Rollouts, TokenWeights
from trainer.algorithms.terms.kl_penalty import KLPenalty
from trainer.algorithms.terms.loss_aggregation import sequence_sum
from trainer.algorithms.terms.policy_gradient import Ratios
from trainer.config import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRollouts:
    """The rollouts of a micro-batch of whole groups."""

    log_ratio_R: torch.Tensor
    """log pi(y) - log pi_ref(y) over all sequences of the rollout, with gradient."""
    rewards_R: torch.Tensor
    """Reward of each rollout."""
    groups_R: torch.Tensor
    """Group of each rollout, from 0."""
    num_groups: int
    """G."""

    @classmethod
    def of(cls, tokens: PolicyTokens) -> Self:
        """Sum the tokens of each rollout."""
        zero = tokens.logprobs_BT.new_zeros(())
        far_BT = tokens.logprobs_BT - tokens.reference_logprobs_BT
        rows_B = torch.where(tokens.loss_mask_BT, far_BT, zero).sum(1)
        names, rollouts_B = torch.unique(tokens.rollouts_B, return_inverse=True)
        groups, groups_B = torch.unique(tokens.groups_B, return_inverse=True)
        # Any row of each rollout: all have the same reward and group.
        row_R = torch.zeros_like(names).scatter(
            0, rollouts_B, torch.arange(len(rollouts_B), device=names.device)
        )
        return cls(
            log_ratio_R=rows_B.new_zeros(len(names)).index_add(0, rollouts_B, rows_B),
            rewards_R=tokens.advantages_BT[row_R, 0],
            groups_R=groups_B[row_R],
            num_groups=len(groups),
        )

    def mean_of_group(self, values_R: torch.Tensor) -> torch.Tensor:
        """The mean over its group for each rollout, [R]."""
        sizes_G = self.groups_R.bincount(minlength=self.num_groups).to(values_R.dtype)
        sums_G = values_R.new_zeros(self.num_groups).index_add(0, self.groups_R, values_R)
        return (sums_G / sizes_G)[self.groups_R]


class GroupwiseObjective:
    """An algorithm whose loss is a mean over rollouts and compares the rollouts of a group.

    Such objectives are off-policy by construction: they do not use the behaviour log-probs, and
    have no importance weights or clipping. Masked tokens (too old, or of unknown version) do not
    enter the comparison.
    """

    whole_step = critic = False
    whole_groups = True

    def __init__(
        self, config: TrainerConfig, losses: Callable[[WholeRollouts], torch.Tensor]
    ) -> None:
        """`losses` computes the loss of each rollout, [R].

        Raises:
            ValueError: there is no reference, or another KL term is set.
        """
        if not config.algorithm.reference_column:
            raise ValueError(
                "algorithm.reference_column is not set: give the column of the reference log-probs"
            )
        for name, weight in (("kl.loss", config.kl.loss), ("kl.reward", config.kl.reward)):
            if weight:
                raise ValueError(
                    f"{name} is {weight}: the objective has a KL term already, set {name} to 0 and "
                    "use algorithm.beta"
                )
        for name, usual in (("staleness_decay", 1.0), ("loss_aggregation", "algorithm")):
            if (given := getattr(config.algorithm, name)) != usual:
                raise ValueError(
                    f"algorithm.{name} is {given!r}: the objective compares whole rollouts "
                    f"with equal weights; set it to {usual!r}"
                )
        self._losses = losses
        self._statistics = KLPenalty.of(config).statistics

    def advantages(self, rollouts: Rollouts) -> NDArray[np.float64]:
        """The rewards."""
        return rollouts.rewards_R

    def token_weights(self, num_tokens_R: NDArray[np.int64]) -> TokenWeights:
        """Every rollout counts the same."""
        return sequence_sum(num_tokens_R)

    def loss(self, tokens: PolicyTokens) -> LossTerms:
        """The losses of the rollouts of the micro-batch, summed."""
        ratios = Ratios.of(tokens)
        found = {
            "train_rollout_logprob_abs_diff": ratios.log_ratio_BT.abs().sum(),
            "staleness_mean": (tokens.staleness_BT * tokens.loss_mask_BT).sum(),
        }
        loss = self._losses(WholeRollouts.of(tokens)).sum()
        return LossTerms(loss=loss, sums={**found, **self._statistics(tokens)})
