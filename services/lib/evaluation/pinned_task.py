"""Tasks of an evaluation: pinned to a weight version, and named after their evaluation."""

from __future__ import annotations

from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2

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
