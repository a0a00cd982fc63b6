"""Conversion of a row to a task message."""

from __future__ import annotations

from seamflow.common.v1.tokens_pb2 import PURPOSE_EVAL, PURPOSE_TRAIN
from seamflow.trajectory.v1.trajectory_pb2 import Task

from services.dataloader.config import DataloaderConfig
from services.lib.tasks.sources import Row
from services.lib.tasks.task_rows import task_of

_PURPOSES = {"train": PURPOSE_TRAIN, "eval": PURPOSE_EVAL}


def make_task(row: Row, epoch: int, config: DataloaderConfig) -> Task:
    """The task of `row`: its id is the row's with the epoch, its payload an object.

    Raises:
        ConfigError: the row has no id, or is not JSON serializable; names the row and the cure.
    """
    task = task_of(row, config.row_fields)
    return Task(
        task_id=f"{task.name}@{epoch}",
        payload_json=task.payload_json,
        num_samples=config.num_samples,
        purpose=_PURPOSES[config.purpose],
    )
