"""Checks of single fields of a request; each error names the field, the value and the cure."""

from __future__ import annotations

import math
from typing import TypeVar

from services.chassis.errors import invalid_argument

Number = TypeVar("Number", int, float)
_MAX_NAME = 256


def positive(field: str, value: int) -> int:
    """`value`, checked to be at least 1.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    if value < 1:
        raise invalid_argument(field, value, "must be at least 1")
    return value


def not_negative(field: str, value: Number) -> Number:
    """`value`, checked to be at least 0 and finite.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    if not 0 <= value < math.inf:  # NaN is not
        raise invalid_argument(
            field, value, "must be at least 0" if value < 0 else "must be finite"
        )
    return value


def not_empty(field: str, value: str) -> str:
    """`value`, checked to have a character.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    if not value:
        raise invalid_argument(field, value, "must not be empty")
    return value


def required(field: str, value: str) -> str:
    """`value`, checked to have 1 to 256 characters.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    if not 1 <= len(value) <= _MAX_NAME:
        raise invalid_argument(field, value, f"must have 1 to {_MAX_NAME} characters")
    return value
