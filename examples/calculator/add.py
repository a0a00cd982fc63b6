"""The tool of the example: a Python function."""

from __future__ import annotations

__all__ = ["add"]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one number.
        b: the other number.
    """
    return a + b
