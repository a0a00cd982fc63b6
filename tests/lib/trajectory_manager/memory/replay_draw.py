"""The draw of committed groups that a step trains again.

A weighted draw without replacement, by the Gumbel-top-k trick: the groups with the greatest
log-weight plus Gumbel noise. The noise is a digest of run, step and
group, so that the draw is deterministic and `lease_step.lua` computes the same one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from trajectory_manager.model.records import ReplayStrategy
from trajectory_manager.model.runs import Replay

_DIGITS = 13
_RANGE = 16.0**_DIGITS


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayGroup:
    """A group that may be trained again."""

    samples: tuple[str, ...]
    """Its samples, in order."""
    reward: float | None
    """Mean of the reward that weighs, over its rollouts that have one."""
    step: int
    """Step that trained or withheld it."""


def trim(groups: dict[str, ReplayGroup], capacity: int) -> None:
    """Drop the oldest groups beyond `capacity`."""
    newest = sorted(groups, key=lambda task_id: (groups[task_id].step, task_id), reverse=True)
    for task_id in newest[capacity:]:
        del groups[task_id]


def draw(
    groups: Mapping[str, ReplayGroup], rules: Replay, run_id: str, step: int, taken: set[str]
) -> list[str]:
    """The groups that `step` replays, at most `rules.groups_per_step` and none that is `taken`.

    Under REWARD a group without the reward that weighs is never drawn.
    """
    weights = _log_weights(
        {name: group for name, group in groups.items() if name not in taken}, rules, step
    )

    def rank(task_id: str) -> tuple[float, str]:
        noise = -math.log(-math.log(_uniform(run_id, step, task_id)))
        return -(weights[task_id] + noise), task_id

    return sorted(weights, key=rank)[: rules.groups_per_step]


def _log_weights(groups: Mapping[str, ReplayGroup], rules: Replay, step: int) -> dict[str, float]:
    if rules.strategy is ReplayStrategy.RECENCY:
        # After a restore the step may be one that was trained before.
        ages = {name: max(0, step - group.step) for name, group in groups.items()}
        return {name: -math.log(1 + age) for name, age in ages.items()}
    rewards = {name: group.reward for name, group in groups.items() if group.reward is not None}
    highest = max(rewards.values(), default=0.0)
    return {name: (reward - highest) / rules.temperature for name, reward in rewards.items()}


def _uniform(run_id: str, step: int, task_id: str) -> float:
    """A number between 0 and 1, both excluded."""
    text = f"{run_id} {step} {task_id}".encode()
    digest = hashlib.sha1(text, usedforsecurity=False).hexdigest()
    return (int(digest[:_DIGITS], 16) + 0.5) / _RANGE
