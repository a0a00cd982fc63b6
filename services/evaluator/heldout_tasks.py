"""Held-out tasks, read as those of training."""

from __future__ import annotations

import asyncio

from services.chassis.config.load import exiting, load_or_exit
from services.chassis.errors import ConfigError
from services.chassis.rpc.clients import credentials, with_token
from services.evaluator.config import EvaluatorConfig
from services.lib.tasks.checked_tasks import checked_tasks
from services.lib.tasks.sources import open_source
from services.lib.tasks.sources.environment import EnvironmentSource, list_tasks
from services.lib.tasks.task_rows import RowFields, TaskRow

_START_SECONDS = 300.0
"""Time that an environment's server may take to appear."""

_ENVIRONMENT = "environment://"
_MOST_TASKS = 100_000
"""An evaluation runs each of them; a function may have no end."""


async def heldout_tasks(config: EvaluatorConfig) -> list[TaskRow]:
    """The tasks that `config` names; waits for an environment's server.

    Raises:
        ConfigError: names the row and the cure.
        DependencyUnavailable: the environment's server does not answer.
    """
    if config.tasks.startswith(_ENVIRONMENT):
        return await environment_tasks(config)
    return await asyncio.to_thread(read_tasks, config.tasks, config.row_fields, config.seed)


def read_tasks(tasks: str, fields: RowFields, seed: int = 0) -> list[TaskRow]:
    """The tasks of a file, a dataset, or a function, which gets `seed`.

    Raises:
        ConfigError: names the row and the cure.
    """
    try:
        source = open_source(tasks, shuffle=False, seed=seed)
        found = checked_tasks(source, fields, _MOST_TASKS + 1)
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


async def environment_tasks(config: EvaluatorConfig) -> list[TaskRow]:
    """The tasks that an environment lists last: `num_heldout`.

    Raises:
        ConfigError: it lists too few, or one is no task.
        DependencyUnavailable: its server does not answer.
    """
    shown = with_token(credentials(config), config.environment_token)
    address = config.tasks.removeprefix(_ENVIRONMENT)
    listed = await list_tasks(address, shown, _START_SECONDS, config.num_heldout)
    source = EnvironmentSource(address, listed.heldout, shuffle=False, seed=0)
    return checked_tasks(source, config.row_fields, _MOST_TASKS)


def main() -> None:
    """Check all rows; those of an environment are known once its server has started."""
    config = load_or_exit(EvaluatorConfig, "evaluator")
    if config.num_heldout:
        return
    with exiting("evaluator"):
        read_tasks(config.tasks, config.row_fields, config.seed)


if __name__ == "__main__":
    main()
