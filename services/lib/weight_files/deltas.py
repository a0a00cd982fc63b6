"""Compression of weight chunks: Zstandard, or a delta to the previous version.

A step of reinforcement learning leaves most bf16 weights as they were. A delta holds the changed
16-bit words only, as distances and values, byte plane by byte plane: the upper bytes of small
distances are zeros, which cost nothing once compressed. Chunks are coded one by one, so that a
delta is resumed, relayed and bounded in memory as any other transfer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

_LEVEL = 1
_COUNT_BYTES = 4
_GAP_BYTES = 4
_WORD_BYTES = 2
_MAX_SHARE = 0.2
"""Share of changed words above which a delta can hardly be smaller than the bytes."""


class DeltaError(ValueError):
    """An encoded chunk that does not decode to what it claims."""


def compress(data: bytes) -> bytes:
    """One Zstandard frame."""
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def decompress(data: memoryview, max_bytes: int) -> bytes:
    """The content of a frame, at most `max_bytes`.

    Raises:
        DeltaError: it is not a frame, or its content is longer.
    """
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= max_bytes:
            raise DeltaError(f"a frame of {size} bytes instead of at most {max_bytes}")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise DeltaError(str(error)) from error


def make_delta(new: bytes, base: bytes) -> bytes | None:
    """The delta from `base` to `new`; None if it would not be smaller than `new`."""
    if len(new) != len(base):
        return None
    words, old = _words(new), _words(base)
    changed = np.flatnonzero(words != old)
    if len(changed) > _MAX_SHARE * len(words):
        return None
    gaps = np.diff(changed, prepend=-1) - 1
    planes = (
        np.array([len(changed)], "<u4"),
        gaps.astype("<u4").view(np.uint8).reshape(-1, _GAP_BYTES).T,
        words[changed].view(np.uint8).reshape(-1, _WORD_BYTES).T,
    )
    tail = new[len(words) * _WORD_BYTES :]
    encoded = compress(b"".join([*(plane.tobytes() for plane in planes), tail]))
    return encoded if len(encoded) < len(new) else None


def apply_delta(delta: memoryview, base: bytes) -> bytes:
    """The `new` of `make_delta`, given its result and the same `base`.

    Raises:
        DeltaError: it is not a delta, or is for another length.
    """
    words = _words(base).copy()
    odd = len(base) % _WORD_BYTES
    most = _COUNT_BYTES + len(words) * (_GAP_BYTES + _WORD_BYTES) + odd
    plain = decompress(delta, most)
    count = int.from_bytes(plain[:_COUNT_BYTES], "little")
    values_at = _COUNT_BYTES + count * _GAP_BYTES
    tail_at = values_at + count * _WORD_BYTES
    if len(plain) != tail_at + odd:
        raise DeltaError(f"{len(plain)} bytes for {count} changed words, not {tail_at + odd}")
    gaps = _numbers(plain[_COUNT_BYTES:values_at], _GAP_BYTES, "<u4")
    changed = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if count and changed[-1] >= len(words):
        raise DeltaError(f"word {changed[-1]} of {len(words)}")
    words[changed] = _numbers(plain[values_at:tail_at], _WORD_BYTES, "<u2")
    return words.tobytes() + plain[tail_at:]


def _words(data: bytes) -> NDArray[np.uint16]:
    return np.frombuffer(data, "<u2", count=len(data) // _WORD_BYTES)


def _numbers(planes: bytes, width: int, dtype: str) -> NDArray[Any]:
    rows = np.frombuffer(planes, np.uint8).reshape(width, -1)
    return np.ascontiguousarray(rows.T).view(dtype).reshape(-1)
