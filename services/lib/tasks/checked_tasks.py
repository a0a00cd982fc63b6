"""The one check of tasks: each row is a task that the store takes, and no two have one name."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice

from services.chassis.errors import ConfigError
from services.lib.tasks.sources import Row, Source
from services.lib.tasks.task_rows import RowFields, TaskRow, task_of

_MOST_SHOWN = 10


class CheckedTasks:
    """Checks rows one by one; of several rows of one name, only the source's first is a task.

    Example:
        >>> checked = CheckedTasks(RowFields())
        >>> tasks = list(checked.tasks(source.rows(0, 0)))
        >>> checked.finish()
    """

    def __init__(self, fields: RowFields) -> None:
        self._fields = fields
        self._named: dict[str, tuple[int, str]] = {}
        self._problems: dict[int, str] = {}
        self._num_rows = 0

    @property
    def broken(self) -> Collection[int]:
        """Indexes of the rows that are no tasks."""
        return self._problems.keys()

    def tasks(self, rows: Iterable[Row]) -> Iterable[TaskRow]:
        """The tasks of the rows, which come in the source's order; others are noted."""
        for row in rows:
            self._num_rows += 1
            try:
                task = task_of(row, self._fields)
            except ConfigError as error:
                self._problems[row.index] = str(error)
                continue
            if self._is_first(task.name, row):
                yield task

    def finish(self) -> None:
        """Say what is broken, after the last row.

        Raises:
            ConfigError: rows are, and the fields do not say to skip them; names up to 10 of them.
        """
        if self._problems and self._fields.broken_rows == "refuse":
            raise ConfigError(self.summary)

    @property
    def summary(self) -> str:
        """The broken rows, in their order, and the cure; one line."""
        shown = [self._problems[index] for index in sorted(self._problems)[:_MOST_SHOWN]]
        if len(self._problems) == 1:
            return shown[0]
        further = len(self._problems) - len(shown)
        return (
            f"{len(self._problems)} of {self._num_rows} rows are no tasks; repair them, or skip "
            f'them with broken_rows = "skip": {"; ".join(shown)}'
            + (f"; and {further} more" if further else "")
        )

    def _is_first(self, name: str, row: Row) -> bool:
        index, where = self._named.setdefault(name, (row.index, row.where))
        if index == row.index:
            return True
        if row.index < index:
            self._named[name] = (row.index, row.where)
            row, where = Row(index=index, values={}, where=where), row.where
        self._problems[row.index] = (
            f"{row.where} has the task id {name!r}, and so has {where}: give each task an id of "
            'its own (7 and "7" are one), or set task_id_field to "" to name them by position'
        )
        return False


def checked_tasks(source: Source, fields: RowFields, most: int) -> list[TaskRow]:
    """The tasks among the first `most` rows of an epoch.

    Raises:
        ConfigError: rows are no tasks, or have the name of another, and are not to be skipped; or
            none is left.
    """
    checked = CheckedTasks(fields)
    tasks = list(checked.tasks(islice(source.rows(0, 0), most)))
    checked.finish()
    if not tasks and checked.broken:
        raise ConfigError(f"no row is a task: {checked.summary}")
    return tasks
