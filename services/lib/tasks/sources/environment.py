"""Tasks of an environment, listed by its server."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Sequence

from seamflow.client.task import Task
from seamflow.credentials import Credentials

from services.lib.tasks.environment_tasks import list_tasks
from services.lib.tasks.order import Permutation
from services.lib.tasks.sources.base import Row


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
        """The rows of an epoch from position `start` on."""
        count = len(self._tasks)
        order = (
            Permutation(count, seed=self._seed, name=f"{epoch}") if self._shuffle else range(count)
        )
        for place in range(start, count):
            task = self._tasks[order[place]]
            where = f"task {order[place] + 1} of the environment at {self._address}"
            values = {"task_id": task.task_id, "payload": task.payload}
            yield Row(index=order[place], values=values, where=where)
