"""Names of the values of the contract's enums, for people and tables."""

from __future__ import annotations

from typing import Any


def enum_name(kind: Any, value: int) -> str:
    """The name without the prefix that all of them have; the number, if a newer release sent it."""
    prefix = kind.Name(0).removesuffix("UNSPECIFIED")
    return kind.Name(value).removeprefix(prefix) if value in kind.values() else str(value)
