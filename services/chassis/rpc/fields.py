"""Fields of messages: checks, whose INVALID_ARGUMENT names field, value and cure, and copies.

A record that says the same as a message calls its fields so, and those are copied by their names.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

from google.protobuf.message import Message

from services.chassis.errors import invalid_argument

Number = TypeVar("Number", int, float)
M = TypeVar("M", bound=Message)
R = TypeVar("R")
_MAX_NAME = 256


def message_of(kind: type[M], record: Any, /, **others: Any) -> M:
    """The message of a dataclass or named tuple: the fields that both have, and `others`."""
    names = _common(kind, type(record)) - others.keys()
    return kind(**{name: getattr(record, name) for name in names}, **others)


def record_of(kind: type[R], message: Message, /, **others: Any) -> R:
    """The dataclass of a message: the fields that both have, and `others`; a list as a tuple."""
    names = _common(type(message), kind) - others.keys()
    return kind(**{name: _plain(getattr(message, name)) for name in names}, **others)


def _common(message: Any, record: Any) -> frozenset[str]:
    names = getattr(record, "_fields", None) or [f.name for f in dataclasses.fields(record)]
    return frozenset(names) & set(message.DESCRIPTOR.fields_by_name)


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | bytes | int | float) else tuple(value)


def positive(field: str, value: int) -> int:
    """`value`, checked to be at least 1."""
    if value < 1:
        raise invalid_argument(field, value, "must be at least 1")
    return value


def not_negative(field: str, value: Number) -> Number:
    """`value`, checked to be at least 0 and finite."""
    if not 0 <= value < math.inf:  # NaN is not
        raise invalid_argument(
            field, value, "must be at least 0" if value < 0 else "must be finite"
        )
    return value


def not_empty(field: str, value: str) -> str:
    """`value`, checked to have a character."""
    if not value:
        raise invalid_argument(field, value, "must not be empty")
    return value


def required(field: str, value: str) -> str:
    """`value`, checked to have 1 to 256 characters."""
    if not 1 <= len(value) <= _MAX_NAME:
        raise invalid_argument(field, value, f"must have 1 to {_MAX_NAME} characters")
    return value
