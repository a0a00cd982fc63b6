"""Files of a run's folder: a JSON object, or one per line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

_WHOLE = 64
"""Newest steps of which all is kept."""
_OF_ALL = (
    *("step", "reward_mean", "reward/success", "share_equal_groups", "entropy"),
    "completion_tokens_mean",
)
"""What rules and curves look at in every step."""


def json_object(file: Path) -> dict[str, Any]:
    """The object of a file; {}: there is no such file, or it is in writing."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, none if it cannot be opened.

    A line that is in writing, or that a killed process left half written, is left out.
    """
    try:
        lines = file.open("rb")
    except OSError:
        return
    with lines:
        yield from _objects(lines)


def read_steps(metrics_file: Path) -> list[dict[str, Any]]:
    """The trainer's lines, one for each optimizer step in order; of a repeated step the last."""
    steps = {line["step"]: line for line in json_lines(metrics_file) if "step" in line}
    return [steps[number] for number in sorted(steps)]


class GrowingFile:
    """JSON objects of a file that is still written to: each line is read once."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._position = 0

    def read(self, forget: Callable[[], None]) -> Iterator[dict[str, Any]]:
        """Objects of the whole lines that are new.

        Args:
            forget: called first if a shorter file has replaced it, which is read from its start.
        """
        try:
            with self._file.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._position:
                    self._position = 0
                    forget()
                file.seek(self._position)
                written, _, _ = file.read().rpartition(b"\n")
        except OSError:
            return
        self._position += len(written) + bool(written)
        yield from _objects(written.split(b"\n"))


class GrowingSteps:
    """The steps of a run in progress: each line is read once, and old steps keep few values."""

    def __init__(self, metrics_file: Path) -> None:
        self._file = GrowingFile(metrics_file)
        self._steps: dict[int, dict[str, Any]] = {}

    def read(self) -> list[dict[str, Any]]:
        """One for each optimizer step in order; of a repeated step the last."""
        for line in self._file.read(self._steps.clear):
            if "step" in line:
                self._steps.pop(line["step"], None)
                self._steps[line["step"]] = line
                self._thin()
        return [self._steps[number] for number in sorted(self._steps)]

    def _thin(self) -> None:
        """Of the step that was read `_WHOLE` lines ago keep only what all steps need."""
        if len(self._steps) > _WHOLE:
            number = next(islice(reversed(self._steps), _WHOLE, None))
            whole = self._steps[number]
            self._steps[number] = {name: whole[name] for name in _OF_ALL if name in whole}


def _objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        record = None
        with suppress(ValueError):
            record = json.loads(line)
        if isinstance(record, dict):
            yield record
