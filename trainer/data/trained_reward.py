"""The reward that is trained on: one of the rollout's named rewards, or their weighted sum."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import replace

from trainer.config import AlgorithmConfig
from trainer.data.token_sequence import TokenSequence


def with_trained_reward(item: TokenSequence, algorithm: AlgorithmConfig) -> TokenSequence:
    """The sequence with the trained reward, and that of each turn, as `algorithm.trained_reward`.

    With `reward_weights`, the weighted sum of those that it has. Otherwise the reward of the name
    given; where none is given, "reward", or the only one there is.

    Raises:
        ValueError: it has no reward to train on; names the rollout, its rewards and the cure.
    """
    weights = algorithm.reward_weights or {_name(item, algorithm): 1.0}
    if not weights.keys() & item.rewards.keys():
        raise ValueError(_missing(item, weights))
    trained = algorithm.trained_reward
    value = sum(weight * item.rewards.get(name, 0.0) for name, weight in weights.items())
    is_own = not weights.keys().isdisjoint(item.own_rewards)
    return replace(
        item,
        own_rewards=item.own_rewards | {trained} if is_own else item.own_rewards - {trained},
        rewards={**item.rewards, trained: value},
        turn_rewards=tuple(
            each._replace(name=trained, value=weights[each.name] * each.value)
            for each in item.turn_rewards
            if each.name in weights
        ),
    )


def _name(item: TokenSequence, algorithm: AlgorithmConfig) -> str:
    name = algorithm.trained_reward
    if not algorithm.reward and name not in item.rewards and len(item.rewards) == 1:
        return next(iter(item.rewards))
    return name


def _missing(item: TokenSequence, weights: Mapping[str, float]) -> str:
    wanted, found = ", ".join(map(repr, weights)), sorted(item.rewards)
    return (
        f"rollout {item.rollout_id!r} of task {item.group_id!r} has no reward {wanted} but "
        f"{found}: set algorithm.reward or algorithm.reward_weights to what it has, or finish "
        "rollouts with that reward"
    )


def unknown_rewards(named: Mapping[str, Collection[str]], found: Collection[str]) -> str:
    """What to tell of settings that name rewards which no rollout so far has; empty: nothing.

    Args:
        named: by setting, the names in it.
        found: all names of rewards that rollouts have.
    """
    lines = [
        f"{setting} names {name!r}" + _near(name, found)
        for setting, names in named.items()
        for name in sorted({*names} - {"", *found})
    ]
    shown = ", ".join(map(repr, sorted(found)))
    return f"the first rollouts have the rewards {shown}, and {'; '.join(lines)}" if lines else ""


def _near(name: str, found: Collection[str]) -> str:
    near = difflib.get_close_matches(name, found, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
