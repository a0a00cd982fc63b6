"""The trainer's metrics of every step, column by column."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from seamflow.inspect.run_files import GrowingFile

_MAX_NAMES = 512
_LINE_BYTES = 1 << 16


class StepTable:
    """Numbers of all steps, of which new ones are read from a file as it grows.

    A step that was repeated after a crash replaces what followed it. Nested numbers, such as
    `seconds`, are named with a dot. What is no number, or not finite, is None.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._lines = GrowingFile(file) if file else None
        self.steps: list[int] = []
        """Numbers of the steps, ascending."""
        self._columns: dict[str, list[float | None]] = {}

    def has_file(self) -> bool:
        """Whether a trainer writes, or has written, the file."""
        return self._file is not None and self._file.is_file()

    @property
    def names(self) -> list[str]:
        return sorted(self._columns)

    def column(self, name: str) -> Sequence[float | None]:
        """Values of a metric, one for each of `steps`; all None if there is none of that name."""
        found = self._columns.get(name)
        return [None] * len(self.steps) if found is None else found

    def row(self, step: int) -> dict[str, float]:
        """The metrics of one step that have a value; none of an unknown step."""
        if step not in self.steps:
            return {}
        index = self.steps.index(step)
        values = ((name, column[index]) for name, column in self._columns.items())
        return {name: value for name, value in values if value is not None}

    def last(self) -> dict[str, float]:
        """The metrics of the newest step; none before the first."""
        return self.row(self.steps[-1]) if self.steps else {}

    def newest(self) -> dict[str, float]:
        """As `last`, but of a file that is not read yet its last line alone is."""
        if self.steps or self._file is None:
            return self.last()
        with suppress(OSError, ValueError), self._file.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _LINE_BYTES, 0))
            return dict(_numbers(json.loads(file.read().rpartition(b"\n")[0].split(b"\n")[-1])))
        return {}

    def read(self) -> None:
        """Take in what the file has got since the last call."""
        for line in self._lines.read(self._forget) if self._lines else ():
            if isinstance(line.get("step"), int):
                self.add(line)

    def _forget(self) -> None:
        self.steps, self._columns = [], {}

    def add(self, line: Mapping[str, Any]) -> None:
        """Take in one step; those after it were undone."""
        numbers = dict(_numbers(line))
        step = int(numbers.pop("step"))
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            for column in self._columns.values():
                column.pop()
        for name in numbers.keys() - self._columns.keys():
            if len(self._columns) < _MAX_NAMES:
                self._columns[name] = [None] * len(self.steps)
        for name, column in self._columns.items():
            column.append(numbers.get(name))
        self.steps.append(step)


def _numbers(line: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, float]]:
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and math.isfinite(value):
            yield f"{prefix}{name}", value
