"""The dataloader's main loop: rows -> tasks -> the trajectory manager's bounded queue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice

from seamflow.errors import SeamflowError
from seamflow.trajectory.v1.trajectory_pb2 import Task

from services.chassis.errors import ConfigError
from services.chassis.log import get_logger
from services.dataloader.config import DataloaderConfig
from services.dataloader.group_sizes import GroupSizes
from services.dataloader.position import Position, PositionFile
from services.dataloader.sources import Row, Source
from services.dataloader.task_queue import TaskQueue
from services.dataloader.tasks import make_task

__all__ = ["Loader"]


class Loader:
    """Submits every task of every epoch once, in order, and stores its position.

    A crash between an acknowledgement and the stored position submits tasks again, with the same
    ids, so that the trajectory manager ignores them (idempotent).
    """

    def __init__(
        self,
        config: DataloaderConfig,
        source: Source,
        queue: TaskQueue,
        sizes: GroupSizes | None = None,
    ) -> None:
        """Load the position. Without `sizes` all groups have the same size.

        Raises:
            ConfigError: the stored position belongs to other tasks.
        """
        self._config = config
        self._source = source
        self._queue = queue
        self._sizes = sizes
        self._file = PositionFile(config.state_file)
        meaning = _source_id(config, source)
        self._position = self._file.load(meaning) if config.resume else Position(source=meaning)

    async def run(self) -> None:
        """Submit tasks until the last epoch is complete.

        Raises:
            ConfigError: a row is invalid, or the trajectory manager rejects its task.
            DependencyUnavailable: the trajectory manager or the run did not appear in time.
        """
        get_logger().info("loading", epoch=self._position.epoch, place=self._position.place)
        while not self._config.epochs or self._position.epoch < self._config.epochs:
            epoch, rows = self._position.epoch, self._rows()
            while tasks := await asyncio.to_thread(self._next_tasks, rows, self._queue.batch_size):
                await self._size(tasks)
                await self._submit(tasks)
            if not self._position.place:
                raise ConfigError(f"tasks: {self._config.tasks} holds no task in epoch {epoch}")
            self._move(self._position.next_epoch())
        get_logger().info("all_submitted", epochs=self._config.epochs)

    def _rows(self) -> Iterator[Row]:
        return self._source.rows(self._position.epoch, self._position.place)

    def _next_tasks(self, rows: Iterator[Row], count: int) -> list[Task]:
        epoch = self._position.epoch
        return [make_task(row, epoch, self._config) for row in islice(rows, count)]

    async def _size(self, tasks: list[Task]) -> None:
        if self._sizes is not None:
            await self._sizes.refresh()
            sizes = {task.task_id: self._sizes.of(task.task_id) for task in tasks}
            position = self._position.sized(sizes)
            if position != self._position:
                self._move(position)
        for task in tasks:
            task.num_samples = self._position.sizes.get(task.task_id, task.num_samples)

    async def _submit(self, tasks: list[Task]) -> None:
        while tasks:
            try:
                count = await self._queue.submit(tasks)
            except SeamflowError as error:
                raise ConfigError(f"the run rejects a task: {error}") from error
            self._move(self._position.advanced([task.task_id for task in tasks[:count]]))
            tasks = tasks[count:]

    def _move(self, position: Position) -> None:
        # Not in a thread, which would continue to write after a cancellation.
        self._file.save(position)
        self._position = position


def _source_id(config: DataloaderConfig, source: Source) -> str:
    """Everything a position depends on: if any of it changes, the position is invalid."""
    order = f"shuffled:{config.seed}" if config.shuffle else f"seed:{config.seed}"
    return f"{config.run_id}|{config.purpose}|{source.fingerprint}|{order}"
