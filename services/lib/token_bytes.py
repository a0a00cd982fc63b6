"""Token arrays as little-endian bytes, as services exchange them."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any, Literal

BYTES_PER_TOKEN = 4


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """int32 of each id."""
    return _bytes(array("i", token_ids))


def unpack_ids(packed: bytes) -> list[int]:
    """The ids of int32 bytes."""
    ids: list[int] = _values("i", packed).tolist()
    return ids


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """float32 of each log-probability."""
    return _bytes(array("f", logprobs))


def unpack_logprobs(packed: bytes) -> list[float]:
    """The log-probabilities of float32 bytes."""
    logprobs: list[float] = _values("f", packed).tolist()
    return logprobs


def _bytes(values: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _values(kind: Literal["i", "f"], packed: bytes) -> array[Any]:
    values: array[Any] = array(kind)
    values.frombytes(packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values
