"""Trajectory balance with asynchrony (TBA, arXiv 2503.18929), its partition function by VarGrad.

    d_r = log pi(y_r) - log pi_ref(y_r) - reward_r / beta
    L = 1/R sum_r (log Z + d_r)^2              log Z = -mean(d) of the group, without gradient

At its minimum pi is pi_ref * exp(reward / beta) / Z, whoever sampled the rollouts: it is made for
old ones.
"""
# ruff: noqa: N806 -- tensors carry shape suffixes

from __future__ import annotations

from functools import partial

import torch

from trainer.algorithms.terms.groupwise import GroupwiseObjective, WholeRollouts
from trainer.config import TrainerConfig

__all__ = ["build"]


def build(config: TrainerConfig) -> GroupwiseObjective:
    """As configured."""
    return GroupwiseObjective(config, partial(_imbalance, beta=config.kl_beta))


def _imbalance(rollouts: WholeRollouts, beta: float) -> torch.Tensor:
    distance_R = rollouts.log_ratio_R - rollouts.rewards_R / beta
    return (distance_R - rollouts.mean_of_group(distance_R.detach())).square()
