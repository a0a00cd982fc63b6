"""All tasks of a source, checked: each row is a task, and no two have one name."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from services.lib.tasks.sources import Row, Source
from services.lib.tasks.task_rows import RowFields, TaskRow, task_of
from services.lib.tasks.unique_names import UniqueNames

__all__ = ["checked_tasks"]


def checked_tasks(source: Source, fields: RowFields, most: int) -> Iterator[TaskRow]:
    """The first `most` tasks of an epoch.

    Raises:
        ConfigError: a row is no task, or has the name of another; names the rows.
    """
    names = UniqueNames()
    rows: Iterator[Row] = islice(source.rows(0, 0), most)
    for row in rows:
        task = task_of(row, fields)
        names.add(task.name, row.where)
        yield task
