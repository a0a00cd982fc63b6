"""Rows that are to be planned, and what they cost together in a micro-batch."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from services.lib.transformer.token_rows import similar_rows
from trainer.data.row_cost import RowCost

_PASS_TOKENS = 128
"""Fixed cost of a forward and backward pass, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRow:
    """What a plan knows of a row."""

    number: int
    """Names it in the plan."""
    group: int
    """Rows of a group have the same."""
    length: int
    """Tokens, 1 or more."""
    outputs: int
    """Tokens that are predicted."""
    shared: int = 0
    """Tokens it has in common with the row before it; rows are in lexicographic order."""


def group_places(rows: Sequence[PlannedRow]) -> list[range]:
    """The places of each group."""
    found = []
    for _, members in groupby(range(len(rows)), lambda place: rows[place].group):
        places = list(members)
        found.append(range(places[0], places[-1] + 1))
    return found


class PackedRows:
    """Tokens and costs of rows, which are named by their places in lexicographic order."""

    def __init__(self, rows: Sequence[PlannedRow], cost: RowCost) -> None:
        self.rows, self._cost = rows, cost
        self._group_of = {rows[places[0]].group: places for places in group_places(rows)}
        self._shared = np.array([row.shared for row in rows] + [0], np.int64)
        self._attention = cost.attention(np.array([row.length for row in rows], np.int64)).tolist()
        self.pass_cost = cost.token_flops * _PASS_TOKENS

    def tokens(self, places: Sequence[int]) -> int:
        """Distinct tokens of rows, or more where rows of two groups begin alike."""
        shared = sum(self._common(*pair) for pair in pairwise(places))
        return sum(self.rows[place].length for place in places) - shared

    def cost(self, places: Sequence[int]) -> float:
        """FLOPs of rows in one micro-batch."""
        outputs = sum(self.rows[place].outputs for place in places)
        return self._cost.of_tokens(self.tokens(places), outputs) + self._attend(places)

    def _attend(self, places: Sequence[int]) -> float:
        """FLOPs of attention: rows of similar length are padded to the longest of them."""
        buckets = similar_rows([self.rows[place].length for place in places])
        found: float = sum(len(each) * self._attention[places[each[0]]] for each in buckets)
        return found

    def saved(self, unit: range, places: Sequence[int]) -> int:
        """Tokens of a unit that rows in other places have."""
        after = bisect(places, unit.start)
        before, behind = places[:after][-1:], places[after : after + 1]
        found = [self._common(place, unit.start) for place in before]
        found += [self._common(unit[-1], place) for place in behind]
        found += [-self._common(*pair) for pair in zip(before, behind, strict=False)]
        return sum(found)

    def most_saved(self, unit: range) -> int:
        """`saved` for all other places; for a group, those of other groups."""
        return int(max(self._shared[unit.start], self._shared[unit.stop]))

    def group(self, unit: range) -> range:
        """The places of the rows of its group."""
        return self._group_of[self.rows[unit.start].group]

    def _common(self, before: int, place: int) -> int:
        """What two rows have in common: what all neighbours in between have."""
        if place == before + 1:
            return self.rows[place].shared
        return int(self._shared[before + 1 : place + 1].min())


class PaddedRows:
    """As `PackedRows`, of rows that are padded to the longest."""

    def __init__(self, rows: Sequence[PlannedRow], cost: RowCost) -> None:
        self.rows, self._cost = rows, cost
        self.pass_cost = cost.token_flops * _PASS_TOKENS

    def tokens(self, places: Sequence[int]) -> int:
        """Tokens of rows, padding included."""
        return len(places) * max((self.rows[place].length for place in places), default=0)

    def cost(self, places: Sequence[int]) -> float:
        """FLOPs of rows in one micro-batch; all tokens pass the output layer."""
        width = max(self.rows[place].length for place in places)
        return self.cost_of_width(width, len(places))

    def saved(self, unit: range, places: Sequence[int]) -> int:
        """Tokens fewer, here less than 0, of a unit and other rows together than apart."""
        together = self.tokens([*places, *unit])
        return self.tokens(places) + self.tokens(unit) - together

    def most_saved(self, _unit: range) -> int:
        """Nothing is computed once for several rows."""
        return 0

    def group(self, unit: range) -> range:
        """Itself: a whole group."""
        return unit

    def cost_of_width(self, width: int, num_rows: int) -> float:
        """FLOPs of some rows of a length."""
        attention = float(self._cost.attention(np.array([width]))[0])
        return num_rows * (self._cost.of_tokens(width, width) + attention)
