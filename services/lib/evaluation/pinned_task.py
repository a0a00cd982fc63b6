"""Tasks of an evaluation, pinned to a weight version and named after their evaluation.

Their rollouts show too whether training would know which of the rewards to use.
"""

from __future__ import annotations

from collections.abc import Collection

from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2

from services.chassis.errors import ConfigError
from services.lib.tasks.task_rows import TaskRow


def pinned_task(task: TaskRow, label: str, version: int, samples: int) -> trajectory_pb2.Task:
    """The task in the evaluation `label`, whose rollouts sample with one version."""
    return trajectory_pb2.Task(
        task_id=f"{task.name}@{label}.v{version}",
        payload_json=task.payload_json,
        num_samples=samples,
        purpose=tokens_pb2.PURPOSE_EVAL,
        pinned_weight_version=version,
    )


def label_of(task_id: str) -> str:
    """The label of the evaluation that a `pinned_task` belongs to."""
    return task_id.rpartition("@")[2].partition(".")[0]


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
