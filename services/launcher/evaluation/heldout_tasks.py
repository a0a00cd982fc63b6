"""Held-out tasks from a file or an environment, as tasks of one evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2

from services.chassis.errors import ConfigError
from services.chassis.rpc.clients import credentials, with_token
from services.launcher.config import LauncherConfig
from services.lib.environment_tasks import list_tasks

__all__ = ["HeldoutTask", "environment_tasks", "label_of", "pinned_task", "read_tasks"]

_START_SECONDS = 300.0
"""Longest wait for an environment's server."""


@dataclass(frozen=True, slots=True)
class HeldoutTask:
    """A task that is never trained on."""

    name: str
    """Unique in its file or environment."""
    payload_json: str
    """What the agent gets."""


def read_tasks(path: Path) -> list[HeldoutTask]:
    """The tasks of a JSONL or Parquet file with the fields task_id and payload.

    Raises:
        ConfigError: names the file, the line and the cure.
    """
    tasks = [_task(record, where) for record, where in _records(path)]
    names = [task.name for task in tasks]
    if not tasks:
        raise ConfigError(f"{path} holds no task: write one JSON object a line")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{path} holds the task {twice!r} twice: give each its own task_id")
    return tasks


async def environment_tasks(config: LauncherConfig, address: str) -> list[HeldoutTask]:
    """The tasks that the environment at `address` lists last: `num_heldout`.

    Raises:
        ConfigError: it lists too few.
        DependencyUnavailable: its server does not answer.
    """
    shown = with_token(credentials(config), config.environment_token)
    listed = await list_tasks(address, shown, _START_SECONDS, config.num_heldout)
    return [HeldoutTask(each.task_id, json.dumps(dict(each.payload))) for each in listed.heldout]


def pinned_task(task: HeldoutTask, label: str, version: int, samples: int) -> trajectory_pb2.Task:
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


def _records(path: Path) -> Iterator[tuple[Any, str]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        for number, row in enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1):
            yield row, f"{path} row {number}"
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                yield json.loads(line), f"{path}:{number}"
            except json.JSONDecodeError as error:
                raise _mistake(f"{path}:{number}", error) from error


def _task(record: Any, where: str) -> HeldoutTask:
    try:
        name, payload = record["task_id"], record["payload"]
    except (KeyError, TypeError) as error:
        raise _mistake(where, error) from error
    if isinstance(payload, str):
        payload = json.loads(payload)
    if not isinstance(payload, Mapping):
        raise _mistake(where, TypeError(f"payload is {payload!r}"))
    return HeldoutTask(str(name), json.dumps(payload))


def _mistake(where: str, error: Exception) -> ConfigError:
    return ConfigError(
        f'{where}: not a task ({error!r}): write {{"task_id": "…", "payload": {{…}}}}'
    )
