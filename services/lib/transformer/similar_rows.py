"""Rows of similar length, whose attention is computed together; without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


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
