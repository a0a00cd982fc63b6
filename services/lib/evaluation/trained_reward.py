"""Whether training would know which of a rollout's rewards to use."""

from __future__ import annotations

from collections.abc import Collection

from seamflow.trajectory.v1 import trajectory_pb2

from services.chassis.errors import ConfigError


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
