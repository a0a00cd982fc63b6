"""Token arrays as bytes: little-endian on every machine."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import TypeVar

_Number = TypeVar("_Number", int, float)


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """int32 ids as bytes."""
    return _swapped(array("i", token_ids)).tobytes()


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """float32 log-probs as bytes."""
    return _swapped(array("f", logprobs)).tobytes()


def unpack_ids(data: bytes) -> Sequence[int]:
    """The ids that `pack_ids` packed."""
    ids = array("i")
    ids.frombytes(data)
    return _swapped(ids)


def unpack_logprobs(data: bytes) -> Sequence[float]:
    """The log-probs that `pack_logprobs` packed."""
    logprobs = array("f")
    logprobs.frombytes(data)
    return _swapped(logprobs)


def _swapped(values: array[_Number]) -> array[_Number]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
