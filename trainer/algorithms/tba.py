"""Trajectory balance with asynchrony (TBA, arXiv 2503.18929), its partition function by VarGrad.

    d_r = log pi(y_r) - log pi_ref(y_r) - reward_r / beta
    L = 1/R sum_r (log Z + d_r)^2              log Z = -mean(d) of the group, without gradient

At its minimum pi is pi_ref * exp(reward / beta) / Z, for rollouts of any policy: it is off-policy
by construction.
"""
# ruff: noqa: N806 -- tensors carry shape suffixes

from __future__ import annotations

from functools import partial

import torch

from trainer.algorithms.terms.groupwise import GroupwiseObjective, WholeRollouts
from trainer.config import TrainerConfig


def build(config: TrainerConfig) -> GroupwiseObjective:
    """Build the algorithm from `config`."""
    return GroupwiseObjective(config, partial(_squared_imbalance, beta=config.algorithm.beta))


def _squared_imbalance(rollouts: WholeRollouts, beta: float) -> torch.Tensor:
    distance_R = rollouts.log_ratio_R - rollouts.rewards_R / beta
    return (distance_R - rollouts.mean_of_group(distance_R.detach())).square()
