"""What a step's samples say of whether it can learn: rewards, lengths, equal groups, cuts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from services.lib.group_baseline import are_equal
from trainer.data.token_sequence import TokenSequence


def other_rewards(rollouts: Sequence[TokenSequence], trained: str) -> dict[str, float]:
    """Means of the rewards beside the trained one, as `reward/<name>`.

    No metric of ours has a slash, so that a reward may be called as one.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for item in rollouts:
        for name in item.rewards.keys() - {trained}:
            found[name].append(item.rewards[name])
    return {f"reward/{name}": float(np.mean(found[name])) for name in sorted(found)}


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
    """Share of the step's groups whose rollouts have one trained reward, but for rounding.

    The rounding is that of `zero_variance_reward`, and the groups that it discarded never reach a
    step: they are dead letters. Each rollout is given once.
    """
    rewards: dict[str, list[float]] = defaultdict(list)
    for item in rollouts:
        rewards[item.group_id].append(item.rewards[reward])
    if not rewards:
        return {}
    return {"share_equal_groups": float(np.mean([are_equal(of) for of in rewards.values()]))}


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
