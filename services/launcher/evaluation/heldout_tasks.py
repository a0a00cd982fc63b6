"""Held-out tasks, read as those of training, as tasks of one evaluation."""

from __future__ import annotations

import json
from pathlib import Path

from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2

from services.chassis.errors import ConfigError
from services.chassis.rpc.clients import credentials, with_token
from services.launcher.checks.process_settings import process_setting
from services.launcher.config import LauncherConfig
from services.launcher.evaluation.evaluation_config import EvaluationConfig
from services.lib.tasks.checked_tasks import checked_tasks
from services.lib.tasks.environment_tasks import list_tasks
from services.lib.tasks.sources import open_source
from services.lib.tasks.task_rows import RowFields, TaskRow

__all__ = ["environment_tasks", "heldout_fields", "label_of", "pinned_task", "read_tasks"]

_START_SECONDS = 300.0
"""Longest wait for an environment's server."""
_MOST_TASKS = 100_000
"""An evaluation runs each of them; a function may have no end."""


def read_tasks(tasks: str, fields: RowFields, seed: int = 0) -> list[TaskRow]:
    """The tasks of a file, a dataset, or a function, which gets `seed`.

    Raises:
        ConfigError: names the row and the cure.
    """
    if tasks.startswith("environment://"):
        raise ConfigError(
            f"held-out tasks are {tasks!r}: give num_heldout in [launcher] for those of the "
            "environment"
        )
    try:
        source = open_source(tasks, shuffle=False, seed=seed)
        found = list(checked_tasks(source, fields, _MOST_TASKS + 1))
    except ConfigError as error:
        raise ConfigError(f"held-out tasks: {error}") from error
    if not found:
        raise ConfigError(f"held-out tasks: {tasks} holds no task")
    if len(found) > _MOST_TASKS:
        raise ConfigError(
            f"held-out tasks: {tasks} holds over {_MOST_TASKS:,}, and an evaluation runs them all: "
            "give fewer"
        )
    return found


def heldout_fields(
    config: LauncherConfig, evaluation: EvaluationConfig, config_file: Path
) -> RowFields:
    """The fields of held-out rows: those of [evaluation], else of training."""
    given = {}
    for name in RowFields.__dataclass_fields__:
        value = getattr(evaluation, name)
        if value is None:
            value = process_setting(config, config_file, f"dataloader.{name}")
            value = _table(name, value) if name == "payload" else value
        if value is not None:
            given[name] = value
    return RowFields(**given)


def _table(name: str, value: object) -> object:
    """A table that `set` or a variable gave as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ConfigError(f"dataloader.{name} is {value!r}, which is no JSON: {error}") from error


async def environment_tasks(config: LauncherConfig, address: str) -> list[TaskRow]:
    """The tasks that the environment at `address` lists last: `num_heldout`.

    Raises:
        ConfigError: it lists too few.
        DependencyUnavailable: its server does not answer.
    """
    shown = with_token(credentials(config), config.environment_token)
    listed = await list_tasks(address, shown, _START_SECONDS, config.num_heldout)
    return [TaskRow(each.task_id, json.dumps(dict(each.payload))) for each in listed.heldout]


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
