"""Tasks from Parquet files and Hugging Face datasets: rows of Arrow as what JSON has."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pyarrow
from pyarrow import types

from services.chassis.errors import ConfigError
from services.lib.tasks.order import Permutation
from services.lib.tasks.task_rows import Row

BATCH = 1000
"""Rows to turn at a time, as the library takes as long for one as for many."""

_OPTIONS = {"config", "split", "revision"}
_DIGEST_ROWS = 10_000


def json_rows(table: pyarrow.Table, indexes: Sequence[int], where: str) -> Iterator[Row]:
    """The rows of a table; `indexes` are their places in the source, which `where` names.

    A float32 is the shortest number that is read as it, 0.1 and not 0.10000000149, as pyarrow
    writes it. A map is an object, and JSON text with its type is what it says. Every struct of a
    column has the same fields, those that a row did not have as null: a null field of a struct is
    left out, a null column stays.
    """
    table = _short_floats(table)
    for place, index in enumerate(indexes):
        named = f"{where} row {index + 1}"
        try:
            values = table.slice(place, 1).to_pylist(maps_as_pydicts="strict")[0]
            kept = {field.name: _own(values[field.name], field.type) for field in table.schema}
        except (ValueError, KeyError) as error:  # no UTF-8, a time beyond the calendar, a key twice
            yield Row(
                index=index, values={}, where=named, problem=f"{named} cannot be read: {error}"
            )
        else:
            yield Row(index=index, values=kept, where=named)


def _short_floats(table: pyarrow.Table) -> pyarrow.Table:
    texts = _changed(table.schema, pyarrow.string())
    if texts == table.schema:
        return table
    return table.cast(texts).cast(_changed(table.schema, pyarrow.float64()))


def _changed(schema: pyarrow.Schema, to: pyarrow.DataType) -> pyarrow.Schema:
    def leaf(kind: pyarrow.DataType) -> pyarrow.DataType:
        return to if types.is_float32(kind) or types.is_float16(kind) else kind

    return pyarrow.schema([field.with_type(_with(field.type, leaf)) for field in schema])


def _with(
    kind: pyarrow.DataType, leaf: Callable[[pyarrow.DataType], pyarrow.DataType]
) -> pyarrow.DataType:
    """The type with `leaf` of each type that has no parts."""
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_with(field.type, leaf)) for field in kind])
    if types.is_map(kind):
        return pyarrow.map_(_with(kind.key_type, leaf), _with(kind.item_type, leaf))
    if types.is_dictionary(kind):
        return kind if leaf(kind.value_type) == kind.value_type else leaf(kind.value_type)
    if not _is_list(kind):
        return leaf(kind)
    field = kind.value_field.with_type(_with(kind.value_type, leaf))
    if types.is_fixed_size_list(kind):
        return pyarrow.list_(field, kind.list_size)
    return pyarrow.large_list(field) if types.is_large_list(kind) else pyarrow.list_(field)


def _is_list(kind: pyarrow.DataType) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _own(value: Any, kind: pyarrow.DataType) -> Any:
    if value is None:
        return None
    if types.is_struct(kind):
        return {f.name: _own(value[f.name], f.type) for f in kind if value[f.name] is not None}
    if types.is_map(kind):
        return {key: _own(each, kind.item_type) for key, each in value.items()}
    if _is_list(kind):
        return [_own(each, kind.value_type) for each in value]
    is_text = isinstance(kind, pyarrow.BaseExtensionType) and kind.extension_name == "arrow.json"
    return json.loads(value) if is_text else value


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
