"""Rows of one forward pass: those that share a prefix together, or those of similar length.

Shape suffixes: B rows of a forward pass, T tokens (padded on the right).
"""
# ruff: noqa: N806 -- arrays carry shape suffixes

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from services.lib.transformer.token_rows import shared_tokens
from services.scoring.scorer import Row

_NOTHING = np.zeros(0, np.int32)


def prefix_batches(rows: Sequence[Row], max_tokens: int) -> Iterator[list[int]]:
    """Indices of rows with at most `max_tokens` distinct tokens, or of one row.

    In lexicographic order, a row has the longest common prefix with its predecessor.
    """
    batch: list[int] = []
    num_tokens, before = 0, _NOTHING
    for number in sorted(range(len(rows)), key=lambda n: rows[n].token_ids_T.tolist()):
        ids_T = rows[number].token_ids_T
        num_new = len(ids_T) - shared_tokens(before, ids_T)
        if batch and num_tokens + num_new > max_tokens:
            yield batch
            batch, num_tokens, num_new = [], 0, len(ids_T)
        batch.append(number)
        num_tokens, before = num_tokens + num_new, ids_T
    if batch:
        yield batch


def padded_batches(rows: Sequence[Row], max_tokens: int) -> Iterator[list[int]]:
    """Indices of rows of similar length, in total at most `max_tokens` with padding, or one row."""
    lengths = [len(row.token_ids_T) for row in rows]
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        if batch and lengths[batch[0]] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def token_ids(rows: Sequence[Row]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Token ids of the rows, [B, T] with zeros as padding, and their lengths, [B]."""
    lengths_B = np.array([len(row.token_ids_T) for row in rows], np.int64)
    ids_BT = np.zeros((len(rows), int(lengths_B.max())), np.int32)
    for place, row in enumerate(rows):
        ids_BT[place, : len(row.token_ids_T)] = row.token_ids_T
    return ids_BT, lengths_B
