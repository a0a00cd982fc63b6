"""Rows of an Arrow table as what JSON has, by the rules of pyarrow."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow
from pyarrow import types

from services.lib.tasks.sources.base import Row

BATCH = 1000
"""Rows to turn at a time, as the library takes as long for one as for many."""


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
