"""Turn what a person wrote (TOML values, text of flags and variables) into typed values."""

from __future__ import annotations

import difflib
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

__all__ = ["describe", "from_text", "from_toml", "is_structured"]

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def from_text(text: str, wanted: Any) -> Any:
    """Parse text into the annotation `wanted`; "" is None where allowed.

    Lists of strings are comma-separated; tables and lists of tables are written as in TOML.

    Raises:
        ValueError: the text is not a `wanted`.
    """
    if is_structured(wanted):
        return from_toml(tomllib.loads(f"value = {text}")["value"], wanted)
    inner, optional = _without_none(wanted)
    if optional and text == "":
        return None
    if inner is bool:
        return _boolean(text)
    if inner in (int, float):
        return inner(text)
    if _is_list(inner):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return _from_string(text, inner)


def from_toml(value: object, wanted: Any) -> Any:
    """Check a parsed TOML value against the annotation `wanted`, strictly: "1" is not a number.

    Raises:
        ValueError: the value is not a `wanted`.
    """
    inner, _ = _without_none(wanted)
    if inner is float and type(value) is int:
        return float(value)
    if inner in (int, float, bool):
        if type(value) is not inner:
            raise ValueError(f"{value!r} is not {describe(inner)}")
        return value
    if _is_list(inner):
        if not isinstance(value, list):
            raise ValueError(f"{value!r} is not {describe(inner)}")
        return tuple(from_toml(part, typing.get_args(inner)[0]) for part in value)
    if _is_table(inner) or is_dataclass(inner):
        return _table(value, inner)
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not {describe(inner)}")  # noqa: TRY004 -- a user's mistake
    return _from_string(value, inner)


def describe(wanted: Any) -> str:
    """The annotation in a person's words: "a whole number", "one of a, b"."""
    inner, _ = _without_none(wanted)
    if choices := _choices(inner):
        return f"one of {', '.join(choices)}"
    if _is_list(inner):
        return "a list of tables" if is_structured(wanted) else "a list of strings"
    if is_structured(wanted):
        return "a table"
    words = {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
    return words.get(inner, "a string")


def is_structured(wanted: Any) -> bool:
    """Whether a value of the annotation `wanted` is made of TOML tables."""
    inner, _ = _without_none(wanted)
    if _is_list(inner):
        return is_structured(typing.get_args(inner)[0])
    return _is_table(inner) or is_dataclass(inner)


def _table(value: object, wanted: Any) -> Any:
    """A mapping with free keys, or a dataclass with a key for each field."""
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not a table")  # noqa: TRY004 -- a user's mistake
    if _is_table(wanted):
        part = typing.get_args(wanted)[1]
        return {key: _entry(key, entry, part) for key, entry in value.items()}
    kinds = typing.get_type_hints(wanted)
    for key in value.keys() - kinds.keys():
        near = difflib.get_close_matches(key, kinds, n=1, cutoff=0.5)
        raise ValueError(f"{key}: unknown key" + (f"; did you mean {near[0]}?" if near else ""))
    for field in fields(wanted):
        required = field.default is MISSING and field.default_factory is MISSING
        if required and field.name not in value:
            raise ValueError(f"{field.name} is not set")
    return wanted(**{key: _entry(key, entry, kinds[key]) for key, entry in value.items()})


def _entry(key: str, value: object, wanted: Any) -> Any:
    try:
        return from_toml(value, wanted)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def _from_string(text: str, wanted: Any) -> Any:
    if wanted is Path:
        return Path(text)
    if (choices := _choices(wanted)) and text not in choices:
        raise ValueError(f"{text!r} is not {describe(wanted)}")
    return wanted(text) if isinstance(wanted, type) else text


def _boolean(text: str) -> bool:
    if text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    raise ValueError(f"{text!r} is not true or false")


def _choices(wanted: Any) -> tuple[str, ...]:
    if typing.get_origin(wanted) is typing.Literal:
        return typing.get_args(wanted)
    if isinstance(wanted, type) and issubclass(wanted, StrEnum):
        return tuple(wanted)
    return ()


def _is_list(wanted: Any) -> bool:
    return typing.get_origin(wanted) is tuple


def _is_table(wanted: Any) -> bool:
    return typing.get_origin(wanted) is Mapping


def _without_none(wanted: Any) -> tuple[Any, bool]:
    if typing.get_origin(wanted) not in (types.UnionType, typing.Union):
        return wanted, False
    inner = [kind for kind in typing.get_args(wanted) if kind is not types.NoneType]
    assert len(inner) == 1, f"a config field may be X or X | None, not {wanted}"
    return inner[0], True
