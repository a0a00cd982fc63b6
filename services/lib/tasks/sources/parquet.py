"""Tasks from a Parquet file: one row group in memory at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from services.chassis.errors import ConfigError
from services.lib.tasks.order import Permutation
from services.lib.tasks.sources.base import Row


class ParquetSource:
    """One row a task. Shuffling orders row groups, then the rows of each, so it still streams."""

    def __init__(self, path: Path, *, shuffle: bool, seed: int) -> None:
        """Read the footer of `path`.

        Raises:
            ConfigError: pyarrow is not installed, or the file is not Parquet or holds no row.
        """
        try:
            from pyarrow import ArrowInvalid, parquet
        except ImportError as error:
            cure = 'pip install "seamflow[dataloader]"'
            raise ConfigError(f"tasks: {path} needs pyarrow: {cure}") from error
        try:
            self._file = parquet.ParquetFile(path)
        except (ArrowInvalid, OSError) as error:
            raise ConfigError(f"tasks: {path} is not a Parquet file: {error}") from error
        groups = self._file.metadata.num_row_groups
        self._sizes = [self._file.metadata.row_group(group).num_rows for group in range(groups)]
        self._firsts = [0, *accumulate(self._sizes)]
        if not self._firsts[-1]:
            raise ConfigError(f"tasks: {path} holds no task")
        self._path = path
        self._shuffle = shuffle
        self._seed = seed

    @property
    def fingerprint(self) -> str:
        """File size and row groups."""
        return f"parquet:{self._path.stat().st_size}:{self._sizes}"

    @cached_property
    def content(self) -> str:
        """The SHA-256 of the file."""
        with self._path.open("rb") as file:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"

    def rows(self, epoch: int, start: int) -> Iterator[Row]:
        """The rows of an epoch from position `start` on, read by row group."""
        groups = self._order(len(self._sizes), f"{epoch}")
        for place in range(len(groups)):
            group = groups[place]
            size = self._sizes[group]
            if start < size:
                yield from self._group_rows(group, epoch, start)
            start = max(0, start - size)

    def _group_rows(self, group: int, epoch: int, start: int) -> Iterator[Row]:
        from services.lib.tasks.sources.arrow_rows import BATCH, json_rows

        table = self._file.read_row_group(group)
        order = self._order(self._sizes[group], f"{epoch}:{group}")
        for begin in range(start, len(order), BATCH):
            places = [order[place] for place in range(begin, min(begin + BATCH, len(order)))]
            indexes = [self._firsts[group] + place for place in places]
            yield from json_rows(table.take(places), indexes, str(self._path))

    def _order(self, count: int, name: str) -> Sequence[int] | Permutation:
        return Permutation(count, seed=self._seed, name=name) if self._shuffle else range(count)
