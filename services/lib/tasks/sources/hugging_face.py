"""Tasks from a Hugging Face dataset: by name from the hub, or from a local dataset folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any
from urllib.parse import parse_qsl

from services.chassis.errors import ConfigError
from services.lib.tasks.order import Permutation
from services.lib.tasks.sources.base import Row

_OPTIONS = {"config", "split", "revision"}
_DIGEST_ROWS = 10_000


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
        """As the library computes it, from the folder's place and time."""
        return f"hf:{self._rows._fingerprint}"

    @cached_property
    def content(self) -> str:
        """A digest of the rows as Arrow has them."""
        digest = hashlib.sha256()
        for table in self._rows.with_format("arrow").iter(_DIGEST_ROWS):
            for batch in table.combine_chunks().to_batches():
                digest.update(batch.serialize())
        return f"sha256:{digest.hexdigest()}"

    def rows(self, epoch: int, start: int) -> Iterator[Row]:
        """The rows of an epoch from position `start` on."""
        from services.lib.tasks.sources.arrow_rows import BATCH, json_rows

        count, tables = len(self._rows), self._rows.with_format("arrow")
        order = (
            Permutation(count, seed=self._seed, name=f"{epoch}") if self._shuffle else range(count)
        )
        for begin in range(start, count, BATCH):
            places = [order[place] for place in range(begin, min(begin + BATCH, count))]
            yield from json_rows(tables[places], places, self._where)


def _parse(tasks: str) -> tuple[str, dict[str, str]]:
    """Name and options of "hf://NAME?option=value"."""
    name, _, query = tasks.removeprefix("hf://").partition("?")
    # A plus is itself, as in "train+test", and no space as in forms of the web.
    options = {"split": "train", **dict(parse_qsl(query.replace("+", "%2B")))}
    if not name or (unknown := set(options) - _OPTIONS):
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
