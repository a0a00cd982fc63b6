"""From rewards of rollouts to one advantage for each sequence.

Shape suffixes: R rollouts, N sequences.
"""
# ruff: noqa: N806 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainer.algorithm import Algorithm
from trainer.batch import TokenSequence

__all__ = ["sequence_advantages"]


def sequence_advantages(
    sequences: Sequence[TokenSequence],
    algorithm: Algorithm,
    reward: str,
    shuffle: np.random.Generator | None = None,
) -> NDArray[np.float64]:
    """Advantages [N]. A rollout counts once in its group, however many sequences it gave.

    Args:
        reward: name of the reward to train on.
        shuffle: permutes the rewards over the rollouts first: a control, nothing can be learnt.

    Raises:
        ValueError: a rollout has no reward of that name.
    """
    rollouts = {item.rollout_id: item for item in sequences}
    rewards_R = np.array([_reward(item, reward) for item in rollouts.values()], np.float64)
    if shuffle is not None:
        rewards_R = shuffle.permutation(rewards_R)
    advantages_R = algorithm.advantages(rewards_R, [item.group_id for item in rollouts.values()])
    by_rollout = dict(zip(rollouts, advantages_R, strict=True))
    return np.array([by_rollout[item.rollout_id] for item in sequences], np.float64)


def _reward(item: TokenSequence, name: str) -> float:
    if name not in item.rewards:
        raise ValueError(
            f"rollout {item.rollout_id!r} has no reward {name!r} but {sorted(item.rewards)}: "
            "set `reward` to one of them, or let the agent finish with it"
        )
    return item.rewards[name]
