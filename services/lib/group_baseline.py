"""Which algorithms compare the rollouts of a group, and which groups have nothing to compare."""

from __future__ import annotations

import math
from collections.abc import Collection

from services.chassis.errors import ConfigError

_LEARN_ALONE = ("distillation", "ma_ppo", "ppo", "reinforce_pp", "turn_ppo")
"""Built-in algorithms whose baseline is a critic, the whole step's mean reward, or a teacher."""


def compares_groups(algorithm: str) -> bool:
    """Whether a built-in algorithm compares the rewards of a group; of a plug-in: nobody knows, so
    False."""
    return ":" not in algorithm and algorithm not in _LEARN_ALONE


def are_equal(rewards: Collection[float]) -> bool:
    """Whether rewards of a group, at least one, differ by rounding alone.

    The rule of the store, which discards such groups (common_reward in settle_rollouts.lua).
    """
    return math.isclose(min(rewards), max(rewards), rel_tol=1e-6, abs_tol=1e-9)


def check_group_size(setting: str, group_size: int, algorithm: str) -> None:
    """Check that groups have something to compare.

    Raises:
        ConfigError: they do not; names `setting`, the value and the cure.
    """
    if group_size == 1 and compares_groups(algorithm):
        raise ConfigError(
            f"{setting} is 1, but trainer.algorithm.name is {algorithm!r}, which compares the "
            "rollouts of a group: every advantage would be 0 and nothing would be learned. Set "
            f"{setting} to 2 or more (8 is usual), or use one of {', '.join(_LEARN_ALONE)}"
        )
