"""Online, iterative DPO (arXiv 2305.18290; RLHF Workflow, arXiv 2405.07863).

    L = -mean over groups of log sigmoid(beta * (l_best - l_worst))
    l = log pi(y) - log pi_ref(y)

The preference pair of a group is its best and its worst rollout by reward; the reward may be the
column of a preference model. A group of equal rewards has no pair and a loss of 0.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.functional import logsigmoid

from trainer.algorithms.terms.groupwise import GroupwiseObjective, WholeRollouts
from trainer.config import TrainerConfig


def build(config: TrainerConfig) -> GroupwiseObjective:
    """Build the algorithm from `config`."""
    return GroupwiseObjective(config, partial(_group_losses, beta=config.algorithm.beta))


def _group_losses(rollouts: WholeRollouts, beta: float) -> torch.Tensor:
    losses = [_pair_loss(rollouts, group, beta) for group in range(rollouts.num_groups)]
    return torch.stack(losses)


def _pair_loss(rollouts: WholeRollouts, group: int, beta: float) -> torch.Tensor:
    """The loss of a group times its number of rollouts, as the step takes the mean over these."""
    members = (rollouts.groups_R == group).nonzero()[:, 0]
    rewards = rollouts.rewards_R[members]
    best, worst = members[rewards.argmax()], members[rewards.argmin()]
    if rewards.max() == rewards.min():
        return rollouts.log_ratio_R[members].sum() * 0.0
    margin = rollouts.log_ratio_R[best] - rollouts.log_ratio_R[worst]
    return -logsigmoid(beta * margin) * len(members)
