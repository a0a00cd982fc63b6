"""Online, iterative DPO (arXiv 2305.18290; RLHF Workflow, arXiv 2405.07863).

    L = -mean over groups of log sigmoid(beta * (l_best - l_worst))
    l = log pi(y) - log pi_ref(y)

The best and the worst rollout of each group are the pair that is preferred one over the other, by
the reward that is trained on: a preference model's column makes it preference learning. A group in
which all are alike has none and counts as a loss of 0.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.functional import logsigmoid

from trainer.algorithms.terms.groupwise import GroupwiseObjective, WholeRollouts
from trainer.config import TrainerConfig

__all__ = ["build"]


def build(config: TrainerConfig) -> GroupwiseObjective:
    """As configured."""
    return GroupwiseObjective(config, partial(_regret, beta=config.kl_beta))


def _regret(rollouts: WholeRollouts, beta: float) -> torch.Tensor:
    losses = [_of_pair(rollouts, group, beta) for group in range(rollouts.num_groups)]
    return torch.stack(losses)


def _of_pair(rollouts: WholeRollouts, group: int, beta: float) -> torch.Tensor:
    """Of a group, as often as it has rollouts: the mean is over these."""
    members = (rollouts.groups_R == group).nonzero()[:, 0]
    rewards = rollouts.rewards_R[members]
    best, worst = members[rewards.argmax()], members[rewards.argmin()]
    if rewards.max() == rewards.min():
        return rollouts.log_ratio_R[members].sum() * 0.0
    margin = rollouts.log_ratio_R[best] - rollouts.log_ratio_R[worst]
    return -logsigmoid(beta * margin) * len(members)
