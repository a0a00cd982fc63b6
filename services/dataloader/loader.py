"""The dataloader's main loop: rows -> tasks -> the trajectory manager's bounded queue."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice
from pathlib import Path

from seamflow.common.v1.tokens_pb2 import PURPOSE_EVAL, PURPOSE_TRAIN
from seamflow.errors import SeamflowError
from seamflow.trajectory.v1.trajectory_pb2 import Task

from services.chassis.errors import ConfigError
from services.chassis.log import get_logger
from services.dataloader.config import DataloaderConfig
from services.dataloader.curriculum import Curriculum, GroupSizes
from services.dataloader.task_queue import TaskQueue
from services.lib.tasks.sources import Row, Source
from services.lib.tasks.task_rows import task_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The next task to submit."""

    source: str
    """Fingerprint of source, order, run and purpose, as release 0.2 has it."""
    content: str = ""
    """The same with a digest of the tasks; "": it is not known. With another one, or where it is
    not known with another `source`, the position is invalid."""
    epoch: int = 0
    """Pass over the source, from 0."""
    place: int = 0
    """Place in the order of that epoch, from 0."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Task id -> group size, of following tasks that may have been submitted."""

    def advanced(self, num_rows: int, task_ids: Sequence[str]) -> Position:
        """The position after these rows, with the ids of those that are tasks."""
        sizes = {name: size for name, size in self.sizes.items() if name not in task_ids}
        return replace(self, place=self.place + num_rows, sizes=sizes)

    def sized(self, sizes: Mapping[str, int]) -> Position:
        """The position with added group sizes; existing ones are kept."""
        return replace(self, sizes={**sizes, **self.sizes})

    def next_epoch(self) -> Position:
        return replace(self, epoch=self.epoch + 1, place=0)


@dataclass(frozen=True, slots=True)
class PositionFile:
    """File of a position, written atomically; without a path nothing is stored."""

    path: Path | None
    """A small JSON file."""

    def load(self, start: Position) -> Position:
        """The stored position, or `start` if there is none.

        Raises:
            ConfigError: the file is damaged, or its position refers to other tasks.
        """
        if self.path is None or not self.path.exists():
            return start
        try:
            stored = _position(self.path.read_text())
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"state_file {self.path} cannot be read: {error}") from error
        is_known = bool(stored.content)
        was, now = (each.content if is_known else each.source for each in (stored, start))
        if was != now:
            raise ConfigError(
                f"state_file {self.path} belongs to other tasks, or to another run or order: it "
                f"has {was!r}, and now it is {now!r}: undo the change, or start over without "
                "--resume"
            )
        return replace(stored, source=start.source, content=start.content)

    def save(self, position: Position) -> None:
        """Replace the stored position atomically.

        Raises:
            ConfigError: the file cannot be written.
        """
        if self.path is None:
            return
        partial = self.path.with_name(f"{self.path.name}.partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("w") as file:
                stored = asdict(position)
                if not position.sizes:  # older releases do not know the field
                    del stored["sizes"]
                json.dump(stored, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path)
        except OSError as error:
            raise ConfigError(f"state_file {self.path}: {error.strerror}") from error


def _position(text: str) -> Position:
    """Read a position of this release or a neighbouring one, whose further fields are ignored."""
    known = {each.name for each in fields(Position)}
    return Position(**{k: v for k, v in json.loads(text).items() if k in known})


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
        self._position = stored_position(config, source)
        self.broken: Collection[int] = ()
        """Indexes of rows to leave out, as other rows have their names."""

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
                await self._size([*drawn.values()])
                await self._submit(tasks, drawn)
            if not self._position.place:
                raise ConfigError(f"tasks: {self._config.tasks} holds no task in epoch {epoch}")
            self._move(self._position.next_epoch())
        get_logger().info("all_submitted", epochs=epochs)

    def _rows(self) -> Iterator[Row]:
        return self._source.rows(self._position.epoch, self._position.place)

    def _next_tasks(self, rows: Iterator[Row], count: int) -> list[Task | None]:
        """The tasks of the next rows; None for a row that is left out."""
        made = [(self._task(row), row) for row in islice(rows, count)]
        self._where = {task.task_id: row.where for task, row in made if task is not None}
        return [task for task, _ in made]

    def _task(self, row: Row) -> Task | None:
        if row.index in self.broken:
            return None
        try:
            return make_task(row, self._position.epoch, self._config)
        except ConfigError as error:
            if self._config.broken_rows == "refuse":
                raise
            get_logger().warning("row_skipped", row=row.where, error=str(error))
            return None

    async def _drawn(self, tasks: Sequence[Task | None]) -> dict[int, Task]:
        """The tasks that are to be submitted, by their place among `tasks`."""
        found = {index: task for index, task in enumerate(tasks) if task is not None}
        if self._curriculum is None:
            return found
        await self._curriculum.refresh()
        return {i: task for i, task in found.items() if self._curriculum.is_drawn(task.task_id)}

    async def _size(self, tasks: list[Task]) -> None:
        if self._sizes is not None:
            await self._sizes.refresh()
            sizes = {task.task_id: self._sizes.of(task.task_id) for task in tasks}
            position = self._position.sized(sizes)
            if position != self._position:
                self._move(position)
        for task in tasks:
            task.num_samples = self._position.sizes.get(task.task_id, task.num_samples)

    async def _submit(self, tasks: Sequence[Task | None], drawn: dict[int, Task]) -> None:
        """Submit the drawn ones among the tasks; the position passes the others with them."""
        begin, places = 0, [*drawn]
        while begin < len(tasks):
            count = await self._submitted([drawn[place] for place in places]) if places else 0
            places = places[count:]
            end = places[0] if places else len(tasks)
            names = [task.task_id for task in tasks[begin:end] if task is not None]
            self._move(self._position.advanced(end - begin, names))
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


def stored_position(config: DataloaderConfig, source: Source) -> Position:
    """Where to go on; the first position has all that it depends on.

    Raises:
        ConfigError: any of that has changed, or the file of the position is damaged.
    """
    order = f"shuffled:{config.seed}" if config.shuffle else f"seed:{config.seed}"
    of_run = f"{config.run_id}|{config.purpose}"
    start = Position(
        source=f"{of_run}|{source.fingerprint}|{order}",
        content=f"{of_run}|{source.content}|{order}" if source.content else "",
    )
    return PositionFile(config.state_file).load(start) if config.resume else start


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
