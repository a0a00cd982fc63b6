"""The tasks that an environment lists, split into those to train on and those to evaluate with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seamflow.client.task import Task
from seamflow.credentials import Credentials
from seamflow.environment import EnvironmentClient
from seamflow.errors import SeamflowError

from services.chassis.errors import ConfigError, DependencyUnavailable


@dataclass(frozen=True, slots=True)
class EnvironmentTasks:
    """The tasks of an environment, in its order."""

    train: Sequence[Task]
    """All but the last ones; at least one."""
    heldout: Sequence[Task]
    """The last ones, which are never trained on."""


async def list_tasks(
    address: str, credentials: Credentials, seconds: float, num_heldout: int = 0
) -> EnvironmentTasks:
    """List the tasks of the environment at `address`; waits for its server.

    Raises:
        ConfigError: it has no tasks of its own, or no more than `num_heldout`.
        DependencyUnavailable: its server did not answer within `seconds`.
    """
    try:
        async with EnvironmentClient(
            address, credentials=credentials, connect_timeout=None
        ) as environment:
            tasks = [task async for task in environment.tasks(timeout=seconds)]
    except (SeamflowError, OSError) as error:
        raise DependencyUnavailable(f"environment {address}", str(error)) from error
    if not tasks:
        raise ConfigError(
            f"tasks: the environment at {address} has none of its own: give tasks, or define "
            "`tasks` in its class"
        )
    number = len(tasks) - num_heldout
    if number < 1:
        raise ConfigError(
            f"num_heldout is {num_heldout}, and the environment at {address} has {len(tasks)} "
            f"tasks, so that none is left to train on: give at most {len(tasks) - 1}"
        )
    return EnvironmentTasks(tasks[:number], tasks[number:])
