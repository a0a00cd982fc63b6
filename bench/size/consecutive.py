"""The plan of seamflow 0.2, as a baseline: by tokens alone, runs of consecutive rows.

Rows are cut evenly into a run for each rank, and each run evenly into micro-batches, as few as fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, pairwise

import numpy as np

from trainer.data.row_cost import LINEAR
from trainer.data.row_plan import PackedRows, PlannedRow, RowPlan


def plan_consecutive(rows: Sequence[PlannedRow], *, num_ranks: int, budget: int) -> RowPlan:
    """Plan rows that are computed without padding.

    Args:
        rows: groups one after the other, members in lexicographic order; their numbers count up.
        num_ranks: number of ranks.
        budget: distinct tokens of a micro-batch.
    """
    line = PackedRows(rows, LINEAR)
    shares = _evenly(range(len(rows)), rows, num_ranks)
    for parts in count(1):
        cuts = [_evenly(share, rows, parts) for share in shares]
        if all(_fits(piece, line, budget) for cut in cuts for piece in cut):
            return [[list(piece) for piece in cut if piece] for cut in cuts]
    raise AssertionError


def _fits(piece: range, line: PackedRows, budget: int) -> bool:
    longest = max((line.rows[place].length for place in piece), default=0)
    return line.tokens(piece) <= max(budget, longest)


def _evenly(places: range, rows: Sequence[PlannedRow], parts: int) -> list[range]:
    """Consecutive rows in parts of as many tokens, by the middle of each row."""
    tokens = np.array([rows[place].length - rows[place].shared for place in places], np.float64)
    middles = np.cumsum(tokens) - tokens / 2
    part = np.minimum(middles / max(tokens.sum(), 1.0) * parts, parts - 1).astype(int)
    edges = np.searchsorted(part, np.arange(parts + 1)).tolist()
    return [places[begin:end] for begin, end in pairwise(edges)]
