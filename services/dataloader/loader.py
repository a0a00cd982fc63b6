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
from services.dataloader.curriculum import Curriculum
from services.dataloader.group_sizes import GroupSizes
from services.dataloader.position import Position, PositionFile
from services.dataloader.task_queue import TaskQueue
from services.dataloader.tasks import make_task
from services.lib.tasks.sources import Row, Source

__all__ = ["Loader"]


class Loader:
    """Submits the tasks of every epoch once, in order, and stores its position.

    A crash between an acknowledgement and the stored position submits tasks again, with the same
    ids, so that the trajectory manager ignores them (idempotent).
    """

    def __init__(
        self,
        config: DataloaderConfig,
        source: Source,
        queue: TaskQueue,
        sizes: GroupSizes | None = None,
        curriculum: Curriculum | None = None,
    ) -> None:
        """Load the position.

        Without `sizes` all groups have the same size, without `curriculum` no task is passed over.

        Raises:
            ConfigError: the stored position belongs to other tasks.
        """
        self._config = config
        self._source = source
        self._queue = queue
        self._sizes = sizes
        self._curriculum = curriculum
        self._where: dict[str, str] = {}
        self._file = PositionFile(config.state_file)
        meaning = _source_id(config, source)
        self._position = self._file.load(meaning) if config.resume else Position(source=meaning)

    @property
    def is_at_start(self) -> bool:
        """Whether no task of the source has been submitted."""
        return not (self._position.epoch or self._position.place)

    async def run(self) -> None:
        """Submit tasks until the last epoch is complete.

        Raises:
            ConfigError: a row is invalid, or the trajectory manager rejects its task.
            DependencyUnavailable: the trajectory manager or the run did not appear in time.
        """
        get_logger().info("loading", epoch=self._position.epoch, place=self._position.place)
        epochs = self._config.num_epochs
        while not epochs or self._position.epoch < epochs:
            epoch, rows = self._position.epoch, self._rows()
            while tasks := await asyncio.to_thread(self._next_tasks, rows, self._queue.batch_size):
                drawn = await self._drawn(tasks)
                await self._size([tasks[index] for index in drawn])
                await self._submit(tasks, drawn)
            if not self._position.place:
                raise ConfigError(f"tasks: {self._config.tasks} holds no task in epoch {epoch}")
            self._move(self._position.next_epoch())
        get_logger().info("all_submitted", epochs=epochs)

    def _rows(self) -> Iterator[Row]:
        return self._source.rows(self._position.epoch, self._position.place)

    def _next_tasks(self, rows: Iterator[Row], count: int) -> list[Task]:
        epoch = self._position.epoch
        made = [(make_task(row, epoch, self._config), row) for row in islice(rows, count)]
        self._where = {task.task_id: row.where for task, row in made}
        return [task for task, _ in made]

    async def _drawn(self, tasks: list[Task]) -> list[int]:
        """Indexes of the tasks that are to be submitted."""
        if self._curriculum is None:
            return list(range(len(tasks)))
        await self._curriculum.refresh()
        return [i for i, task in enumerate(tasks) if self._curriculum.is_drawn(task.task_id)]

    async def _size(self, tasks: list[Task]) -> None:
        if self._sizes is not None:
            await self._sizes.refresh()
            sizes = {task.task_id: self._sizes.of(task.task_id) for task in tasks}
            position = self._position.sized(sizes)
            if position != self._position:
                self._move(position)
        for task in tasks:
            task.num_samples = self._position.sizes.get(task.task_id, task.num_samples)

    async def _submit(self, tasks: list[Task], drawn: list[int]) -> None:
        """Submit the drawn ones among the tasks; the position passes the others with them."""
        begin = 0
        while begin < len(tasks):
            count = await self._submitted([tasks[index] for index in drawn]) if drawn else 0
            drawn = drawn[count:]
            end = drawn[0] if drawn else len(tasks)
            self._move(self._position.advanced([task.task_id for task in tasks[begin:end]]))
            begin = end

    async def _submitted(self, tasks: list[Task]) -> int:
        try:
            return await self._queue.submit(tasks)
        except SeamflowError as error:
            where = next((self._where[t.task_id] for t in tasks if t.task_id in str(error)), "")
            at = f"{where}: " if where else ""
            raise ConfigError(f"{at}the run rejects a task: {error}") from error

    def _move(self, position: Position) -> None:
        # Not in a thread, which would continue to write after a cancellation.
        self._file.save(position)
        self._position = position


def _source_id(config: DataloaderConfig, source: Source) -> str:
    """Everything a position depends on: if any of it changes, the position is invalid."""
    order = f"shuffled:{config.seed}" if config.shuffle else f"seed:{config.seed}"
    return f"{config.run_id}|{config.purpose}|{source.fingerprint}|{order}"
