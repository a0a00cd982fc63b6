"""DPO and TBA: objectives that compare the whole rollouts of a group.

Shape suffixes: B rows of a micro-batch, T positions that are predicted, R rollouts of the
micro-batch, G groups of it.
"""
# ruff: noqa: N803, N806, N815 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import logsigmoid

from trainer.algorithms.base import LossTerms, PolicyTokens, Rollouts, TokenWeights
from trainer.algorithms.policy_gradient import Ratios, aggregated, kl_statistics
from trainer.config import TrainerConfig


def dpo(config: TrainerConfig) -> GroupwiseObjective:
    """Online, iterative DPO (arXiv 2305.18290; RLHF Workflow, arXiv 2405.07863).

        L = -mean over groups of log sigmoid(beta * (l_best - l_worst))
        l = log pi(y) - log pi_ref(y)

    The preference pair of a group is its best and its worst rollout by reward; the reward may be
    the column of a preference model. A group of equal rewards has no pair and a loss of 0.
    """
    return GroupwiseObjective(config, partial(_of_pairs, beta=config.algorithm.beta))


def _of_pairs(rollouts: WholeRollouts, beta: float) -> torch.Tensor:
    losses = [_of_pair(rollouts, group, beta) for group in range(rollouts.num_groups)]
    return torch.stack(losses)


def _of_pair(rollouts: WholeRollouts, group: int, beta: float) -> torch.Tensor:
    """The loss of a group times its number of rollouts, as the step takes the mean over these."""
    members = (rollouts.groups_R == group).nonzero()[:, 0]
    rewards = rollouts.rewards_R[members]
    best, worst = members[rewards.argmax()], members[rewards.argmin()]
    if rewards.max() == rewards.min():
        return rollouts.log_ratio_R[members].sum() * 0.0
    margin = rollouts.log_ratio_R[best] - rollouts.log_ratio_R[worst]
    return -logsigmoid(beta * margin) * len(members)


def tba(config: TrainerConfig) -> GroupwiseObjective:
    """Trajectory balance with asynchrony (arXiv 2503.18929), its partition function by VarGrad.

        d_r = log pi(y_r) - log pi_ref(y_r) - reward_r / beta
        L = 1/R sum_r (log Z + d_r)^2          log Z = -mean(d) of the group, without gradient

    At its minimum pi is pi_ref * exp(reward / beta) / Z, for rollouts of any policy: it is
    off-policy by construction.
    """
    return GroupwiseObjective(config, partial(_imbalance, beta=config.algorithm.beta))


def _imbalance(rollouts: WholeRollouts, beta: float) -> torch.Tensor:
    distance_R = rollouts.log_ratio_R - rollouts.rewards_R / beta
    return (distance_R - rollouts.mean_of_group(distance_R.detach())).square()


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRollouts:
    """The rollouts of a micro-batch of whole groups."""

    log_ratio_R: torch.Tensor
    """log pi(y) - log pi_ref(y) over all sequences of the rollout, with gradient."""
    rewards_R: torch.Tensor
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
        self._statistics = partial(kl_statistics, config)

    def advantages(self, rollouts: Rollouts) -> NDArray[np.float64]:
        """The rewards."""
        return rollouts.rewards_R

    def token_weights(self, num_tokens_R: NDArray[np.int64]) -> TokenWeights:
        """Every rollout counts the same."""
        return aggregated(num_tokens_R, "sequence_sum")

    def loss(self, tokens: PolicyTokens) -> LossTerms:
        """The losses of the rollouts of the micro-batch, summed."""
        ratios = Ratios.of(tokens)
        found = {
            "train_rollout_logprob_abs_diff": ratios.log_ratio_BT.abs().sum(),
            "staleness_mean": (tokens.staleness_BT * tokens.loss_mask_BT).sum(),
        }
        loss = self._losses(WholeRollouts.of(tokens)).sum()
        return LossTerms(loss=loss, sums={**found, **self._statistics(tokens)})
