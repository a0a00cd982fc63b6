"""Turn what a person wrote (TOML values, text of flags and variables) into typed values."""

from __future__ import annotations

import types
import typing
from enum import StrEnum
from pathlib import Path
from typing import Any

__all__ = ["describe", "from_text", "from_toml"]

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def from_text(text: str, wanted: Any) -> Any:
    """Parse text into the annotation `wanted`; lists are comma-separated, "" is None where allowed.

    Raises:
        ValueError: the text is not a `wanted`.
    """
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
        if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
            raise ValueError(f"{value!r} is not {describe(inner)}")
        return tuple(value)
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not {describe(inner)}")  # noqa: TRY004 -- a user's mistake
    return _from_string(value, inner)


def describe(wanted: Any) -> str:
    """The annotation in a person's words: "a whole number", "one of a, b"."""
    inner, _ = _without_none(wanted)
    if choices := _choices(inner):
        return f"one of {', '.join(choices)}"
    if _is_list(inner):
        return "a list of strings"
    words = {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
    return words.get(inner, "a string")


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


def _without_none(wanted: Any) -> tuple[Any, bool]:
    if typing.get_origin(wanted) not in (types.UnionType, typing.Union):
        return wanted, False
    inner = [kind for kind in typing.get_args(wanted) if kind is not types.NoneType]
    assert len(inner) == 1, f"a config field may be X or X | None, not {wanted}"
    return inner[0], True
