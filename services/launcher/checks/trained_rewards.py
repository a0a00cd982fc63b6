"""Which rewards training uses, by the trainer's settings; checked before the trainer sees any."""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from seamflow.trajectory.v1 import trajectory_pb2

from services.chassis.errors import ConfigError
from services.launcher.checks.process_settings import process_setting
from services.launcher.config import LauncherConfig

__all__ = ["check_trained_reward", "trained_rewards"]


def trained_rewards(config: LauncherConfig, config_file: Path) -> Collection[str]:
    """Names in reward_weights or reward of [trainer.algorithm]; none: neither is set."""
    weights = process_setting(config, config_file, "trainer.algorithm.reward_weights")
    if isinstance(weights, str):
        with suppress(ValueError):  # the trainer's own check names it
            weights = json.loads(weights)
    if isinstance(weights, dict) and weights:
        return weights.keys()
    name = process_setting(config, config_file, "trainer.algorithm.reward")
    return (str(name),) if name else ()


def check_trained_reward(trajectory: trajectory_pb2.Trajectory, wanted: Collection[str]) -> None:
    """Check that training would know what to use of a finished rollout's rewards.

    Raises:
        ConfigError: it would not; names the rollout, its rewards and the cure.
    """
    names = {reward.name for reward in trajectory.rewards.rewards}
    if not names or names & set(wanted or ("reward",)) or (not wanted and len(names) == 1):
        return
    shown = ", ".join(map(repr, sorted(names)))
    raise ConfigError(
        f"rollout {trajectory.rollout_id!r} has the rewards {shown}, and training would use "
        f"{', '.join(map(repr, wanted or ('reward',)))}: in [trainer.algorithm] set "
        f"reward = {sorted(names)[0]!r}, or reward_weights = {{{sorted(names)[0]} = 1.0}}"
    )
