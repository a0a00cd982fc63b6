"""What a step's samples say of whether it can learn: lengths, equal groups, answers cut off."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from trainer.data.token_sequence import TokenSequence

__all__ = ["completion_lengths", "cut_rollouts", "equal_groups"]


def completion_lengths(sequences: Sequence[TokenSequence]) -> dict[str, float]:
    """Mean and maximum of the trainable tokens of a rollout, over all its sequences."""
    tokens: Counter[str] = Counter()
    for item in sequences:
        tokens[item.rollout_id] += int(item.loss_mask_T.sum())
    if not tokens:
        return {}
    lengths = list(tokens.values())
    return {
        "completion_tokens_mean": float(np.mean(lengths)),
        "completion_tokens_max": float(max(lengths)),
    }


def equal_groups(rollouts: Sequence[TokenSequence], reward: str) -> dict[str, float]:
    """Share of the step's groups whose rollouts all have the same trained reward.

    Each rollout is given once. Groups that a run with `zero_variance_reward` discarded never reach
    a step: they are dead letters.
    """
    rewards: dict[str, set[float]] = defaultdict(set)
    for item in rollouts:
        rewards[item.group_id].add(item.rewards[reward])
    if not rewards:
        return {}
    return {"share_equal_groups": float(np.mean([len(of) == 1 for of in rewards.values()]))}


def cut_rollouts(sequences: Sequence[TokenSequence], reward: str) -> dict[str, float]:
    """Share of rollouts that a limit cut off, or one of whose answers; and their mean reward."""
    rollouts = {item.rollout_id: item.rewards[reward] for item in sequences}
    cut = {item.rollout_id for item in sequences if item.cut}
    if not rollouts:
        return {}
    shares = {"share_cut": len(cut) / len(rollouts)}
    if cut:
        shares["reward_cut_mean"] = float(np.mean([rollouts[name] for name in cut]))
    return shares
