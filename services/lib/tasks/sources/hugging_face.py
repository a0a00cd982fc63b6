"""Tasks from a Hugging Face dataset: by name from the hub, or from a local dataset folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from services.chassis.errors import ConfigError
from services.lib.tasks.order import Permutation
from services.lib.tasks.sources.base import Row

__all__ = ["HuggingFaceSource"]

_BATCH = 1000
_OPTIONS = {"config", "split", "revision"}


class HuggingFaceSource:
    """One row a task; memory-mapped, so that a dataset of any size opens at once."""

    def __init__(self, tasks: str, *, shuffle: bool, seed: int) -> None:
        """Open "hf://NAME?split=train&config=main&revision=v1"; the split defaults to train.

        Raises:
            ConfigError: no such dataset, configuration or split, or `datasets` is missing.
        """
        name, options = _parse(tasks)
        self._where = f"{name} ({options['split']})"
        self._rows = _load(tasks, name, options)
        if len(self._rows) == 0:
            raise ConfigError(f"tasks: {tasks} holds no task")
        self._shuffle = shuffle
        self._seed = seed

    @property
    def fingerprint(self) -> str:
        """Identifies the content, as the library computes it."""
        return f"hf:{self._rows._fingerprint}"

    def rows(self, epoch: int, start: int) -> Iterator[Row]:
        """The rows of an epoch from position `start` on; one by one where they are shuffled."""
        count = len(self._rows)
        if not self._shuffle:
            yield from self._in_order(start, count)
            return
        order = Permutation(count, seed=self._seed, name=f"{epoch}")
        for place in range(start, count):
            yield self._row(order[place], self._rows[order[place]])

    def _in_order(self, start: int, count: int) -> Iterator[Row]:
        """By batches, as the library takes as long for one row as for many."""
        for begin in range(start, count, _BATCH):
            columns = self._rows[begin : begin + _BATCH]
            for number, values in enumerate(zip(*columns.values(), strict=True)):
                yield self._row(begin + number, dict(zip(columns, values, strict=True)))

    def _row(self, index: int, values: dict[str, Any]) -> Row:
        return Row(index=index, values=values, where=f"{self._where} row {index + 1}")


def _parse(tasks: str) -> tuple[str, dict[str, str]]:
    """Name and options of "hf://NAME?option=value"."""
    parts = urlsplit(tasks)
    options = {"split": "train", **dict(parse_qsl(parts.query))}
    if not (name := parts.netloc + parts.path) or (unknown := set(options) - _OPTIONS):
        problem = f"option {sorted(unknown)[0]!r}" if name else "no name"
        raise ConfigError(
            f"tasks {tasks!r} has {problem}: write it as "
            "hf://NAME?split=train&config=main&revision=v1"
        )
    return name, options


def _load(tasks: str, name: str, options: dict[str, str]) -> Any:
    try:
        from datasets import load_dataset
    except ImportError as error:
        cure = 'pip install "seamflow[datasets]"'
        raise ConfigError(f"tasks {tasks!r} needs the package datasets: {cure}") from error
    try:
        return load_dataset(
            name,
            options.get("config"),
            split=options["split"],
            revision=options.get("revision"),
        )
    except Exception as error:
        # The library raises errors of many kinds; each says what is wrong in its first line.
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(f"tasks {tasks!r} cannot be loaded: {reason}") from error
