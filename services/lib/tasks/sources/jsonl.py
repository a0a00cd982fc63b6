"""Tasks from a JSON Lines file of any size, whose offsets alone are in memory, or a function."""

from __future__ import annotations

import hashlib
import json
from array import array
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from services.chassis import plugins
from services.chassis.errors import ConfigError
from services.lib.tasks.order import Permutation
from services.lib.tasks.task_rows import Row


class JsonlSource:
    """One JSON object a line; blank lines are skipped. Only \\n ends a line."""

    def __init__(self, path: Path, *, shuffle: bool, seed: int) -> None:
        """Index the lines of `path`.

        Raises:
            ConfigError: the file holds no task.
        """
        self._path = path
        self._shuffle = shuffle
        self._seed = seed
        self._offsets, self._lines, self._content = _index(path)
        if not self._offsets:
            raise ConfigError(f"tasks: {path} holds no task")

    @property
    def fingerprint(self) -> str:
        """File size and number of tasks."""
        return f"jsonl:{self._path.stat().st_size}:{len(self._offsets)}"

    @property
    def content(self) -> str:
        """The SHA-256 of the file."""
        return self._content

    def rows(self, epoch: int, start: int) -> Iterator[Row]:
        """The rows of an epoch from position `start` on, read one by one."""
        count = len(self._offsets)
        order = (
            Permutation(count, seed=self._seed, name=f"{epoch}") if self._shuffle else range(count)
        )
        with self._path.open("rb") as file:
            for place in range(start, count):
                index = order[place]
                file.seek(self._offsets[index])
                yield _row(file.readline(), index, f"{self._path} line {self._lines[index]}")


def _index(path: Path) -> tuple[array[int], array[int], str]:
    """Byte offset and number (from 1) of every line that is not blank; a digest of all."""
    offsets, lines, offset, digest = array("Q"), array("Q"), 0, hashlib.sha256()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            digest.update(line)
            if line.removeprefix(BOM_UTF8 if number == 1 else b"").strip():
                offsets.append(offset)
                lines.append(number)
            offset += len(line)
    return offsets, lines, f"sha256:{digest.hexdigest()}"


def _row(line: bytes, index: int, where: str) -> Row:
    try:
        return Row(index=index, values=_parse(line, where), where=where)
    except ConfigError as error:
        return Row(index=index, values={}, where=where, problem=str(error))


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        values = json.loads(line.decode("utf-8-sig"), parse_constant=_refused)
        if b"\\u" in line:  # half a character may be written as an escape
            json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        cure = "write one JSON object in UTF-8 on a line"
        raise ConfigError(f"{where} is not JSON ({error}): {cure}") from error
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise ConfigError(
            f'{where} is a {kind}: write a JSON object, such as {{"task_id": "a", "payload": {{}}}}'
        )
    return values


def _refused(constant: str) -> float:
    raise ValueError(f"{constant} is no number of JSON")


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSource:
    """Calls `function(seed, epoch)` once an epoch; the same arguments must give the same tasks.

    Example:
        >>> def sums(seed: int, epoch: int):
        ...     random = Random(f"{seed}:{epoch}")
        ...     for number in range(1000):
        ...         yield {"task_id": f"sum-{number}", "payload": {"a": random.randrange(100)}}
    """

    name: str
    """The configured "package.module:function"."""
    function: Callable[[int, int], Iterable[Mapping[str, Any]]]
    seed: int
    """First argument of every call."""

    @classmethod
    def load(cls, name: str, *, seed: int) -> FunctionSource:
        """Import the function.

        Raises:
            ConfigError: there is none of that name.
        """
        try:
            function = plugins.load(name)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"tasks: {error}") from error
        if not callable(function):
            raise ConfigError(f"tasks: {name} is not a function")
        return cls(name=name, function=function, seed=seed)

    @property
    def fingerprint(self) -> str:
        """The name; the function must not change between restarts."""
        return f"function:{self.name}"

    @property
    def content(self) -> str:
        """Unknown: its tasks may have no end."""
        return ""

    def rows(self, epoch: int, start: int) -> Iterator[Row]:
        """The rows of an epoch; those before `start` are generated and skipped."""
        for index, values in islice(enumerate(self._yielded(epoch)), start, None):
            where = f"task {index + 1} of {self.name}"
            if isinstance(values, Mapping):
                yield Row(index=index, values=values, where=where)
            else:
                problem = f"{where} is a {type(values).__name__}: yield dicts"
                yield Row(index=index, values={}, where=where, problem=problem)

    def _yielded(self, epoch: int) -> Iterator[Mapping[str, Any]]:
        try:
            yield from self.function(self.seed, epoch)
        except Exception as error:
            raise ConfigError(f"tasks: {self.name} raised {error!r} in epoch {epoch}") from error
