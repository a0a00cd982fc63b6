"""Tasks that an environment lists, split into those to train on and those to evaluate with."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from seamflow.client.turn import Task
from seamflow.credentials import Credentials
from seamflow.environment import EnvironmentClient
from seamflow.errors import SeamflowError

from services.chassis.errors import ConfigError, DependencyUnavailable
from services.lib.tasks.order import Permutation
from services.lib.tasks.task_rows import Row


class EnvironmentSource:
    """The tasks that an environment lists and that are not held out, in its order."""

    def __init__(self, address: str, tasks: Sequence[Task], *, shuffle: bool, seed: int) -> None:
        self._address = address
        self._tasks = tasks
        self._shuffle = shuffle
        self._seed = seed

    @classmethod
    def read(
        cls, address: str, credentials: Credentials, start_seconds: float, num_heldout: int = 0
    ) -> EnvironmentSource:
        """List the tasks but the last `num_heldout`; waits for the environment's server.

        Raises:
            ConfigError: the environment has no tasks of its own, or no more than `num_heldout`.
            DependencyUnavailable: its server did not answer within `start_seconds`.
        """
        listed = asyncio.run(list_tasks(address, credentials, start_seconds, num_heldout))
        return cls(address, listed.train, shuffle=False, seed=0)

    def ordered(self, *, shuffle: bool, seed: int) -> EnvironmentSource:
        """The same tasks, shuffled or not."""
        return EnvironmentSource(self._address, self._tasks, shuffle=shuffle, seed=seed)

    @property
    def fingerprint(self) -> str:
        """A digest of the names: the same tasks may be listed at another address."""
        names = "\0".join(task.task_id for task in self._tasks)
        return f"environment:{hashlib.sha256(names.encode()).hexdigest()[:16]}"

    @property
    def content(self) -> str:
        """A digest of the names and payloads."""
        digest = hashlib.sha256()
        for task in self._tasks:
            payload = json.dumps(dict(task.payload), sort_keys=True)
            digest.update(json.dumps([task.task_id, payload]).encode())
        return f"sha256:{digest.hexdigest()}"

    def rows(self, epoch: int, start: int) -> Iterator[Row]:
        count = len(self._tasks)
        order = (
            Permutation(count, seed=self._seed, name=f"{epoch}") if self._shuffle else range(count)
        )
        for place in range(start, count):
            task = self._tasks[order[place]]
            where = f"task {order[place] + 1} of the environment at {self._address}"
            values = {"task_id": task.task_id, "payload": task.payload}
            yield Row(index=order[place], values=values, where=where)


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
