"""Rows of tokens: their common prefix, and those of similar length; without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray


def shared_tokens(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Length of the common prefix of two sequences."""
    length = min(len(one), len(other))
    differ = np.nonzero(one[:length] != other[:length])[0]
    return int(differ[0]) if len(differ) else length


def similar_rows(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Buckets of rows, longest first, none less than half as long as the longest of its bucket.

    Args:
        lengths: of the rows, one or more.

    Yields:
        Numbers of rows; those of one length are in order.
    """
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if rows and 2 * lengths[row] < lengths[rows[0]]:
            yield rows
            rows = []
        rows.append(row)
    yield rows
