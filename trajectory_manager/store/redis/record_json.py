"""Records as JSON that the release before and after this one can read.

A field at its default is left out and a field that is not known is ignored, so that a record of
either release equals that of the other wherever no new feature is used.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter

_reader: Any = cache(TypeAdapter)
Record = TypeVar("Record")


def encode(record: Any, *, without: Collection[str] = ()) -> str:
    """The JSON of a dataclass, without some fields and those at their default."""
    return json.dumps({n: v for n, v in _changed(record).items() if n not in without})


def decode(kind: type[Record], text: str | bytes, **others: Any) -> Record:
    """The record of `encode`, with `others` for the fields that were left out."""
    found: Record = _reader(kind).validate_python({**json.loads(text), **others})
    return found


def _changed(record: Any) -> dict[str, Any]:
    kind: type = type(record)
    values = ((name, default, getattr(record, name)) for name, default in _defaults(kind).items())
    return {name: _plain(value) for name, default, value in values if value != default}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return _changed(value)
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


@cache
def _defaults(record: type) -> dict[str, Any]:
    """By field its default; MISSING if it is required."""
    found: dict[str, Any] = {field.name: field.default for field in fields(record)}
    assert all(field.default_factory is MISSING for field in fields(record))
    return found
