"""Which rows each rank computes in which micro-batch.

Ranks are in lock-step: each micro-batch gathers weights from all ranks, so that all wait for the
slowest of those with the same number. A plan is good if these cost the same. Longest processing
time (Graham 1969): rows go, costliest first, into the micro-batch that costs least so far and has
room; micro-batches are then dealt to the ranks in order of their cost.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, groupby, pairwise

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
    length: int
    """Tokens, 1 or more."""
    outputs: int
    """Tokens that are predicted."""
    shared: int = 0
    """Tokens it has in common with the row before it; rows are in lexicographic order."""


def group_places(rows: Sequence[PlannedRow]) -> list[range]:
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


RowPlan = list[list[list[int]]]
"""Of each rank, the numbers of the rows of each micro-batch; ranks may have fewer than others."""
_Rows = PackedRows | PaddedRows

_MORE, _UNITS = 3, 4096
"""Numbers of micro-batches that are tried, from the least that has room, and units they may place
in all: many rows are easy to balance."""
_PIECES = (1, 2, 4)
"""Groups are tried in pieces of the budget over this, to compute shared prefixes once."""


def plan_packed(
    rows: Sequence[PlannedRow],
    cost: RowCost,
    *,
    num_ranks: int,
    budget: int,
    whole_groups: bool = False,
    at_least: int = 1,
) -> RowPlan:
    """Plan rows that are computed without padding, shared prefixes once.

    Args:
        rows: groups one after the other.
        budget: distinct tokens of a micro-batch; a row or whole group above it is alone in one.
        whole_groups: never split a group.
        at_least: micro-batches of a rank, if it has as many rows.
    """
    line = PackedRows(rows, cost)
    cuts = [group_places(rows)] if whole_groups else list(_cuts(rows, line, budget))
    return _numbered(_cheapest(line, cuts, num_ranks, budget, at_least), rows)


def plan_padded(
    rows: Sequence[PlannedRow],
    cost: RowCost,
    *,
    num_ranks: int,
    budget: int,
    whole_groups: bool = False,
    at_least: int = 1,
) -> RowPlan:
    """Plan rows that are padded to the longest of their micro-batch.

    Args: as those of `plan_packed`; the budget counts padding. Without whole groups, `at_least` has
    no effect: rows of similar length are together.
    """
    line = PaddedRows(rows, cost)
    plan = (
        _cheapest(line, [group_places(rows)], num_ranks, budget, at_least)
        if whole_groups
        else _by_length(line, num_ranks, budget)
    )
    return _numbered(plan, rows)


def _numbered(plan: RowPlan, rows: Sequence[PlannedRow]) -> RowPlan:
    """The plan of rows, from one of their places."""
    return [[[rows[place].number for place in places] for places in share] for share in plan]


def lock_step(costs: Sequence[Sequence[float]]) -> float:
    """What a step costs: of each number of a micro-batch, the most over all ranks."""
    most = max(map(len, costs), default=0)
    return sum(max(each[n] for each in costs if n < len(each)) for n in range(most))


def _cuts(rows: Sequence[PlannedRow], line: PackedRows, budget: int) -> Iterator[list[range]]:
    """Ways to cut the rows into units that stay together: pieces of groups, or single rows."""
    groups = group_places(rows)
    if any(rows[place].shared for group in groups for place in group[1:]):
        for parts in _PIECES:
            yield [piece for group in groups for piece in _pieces(group, line, budget // parts)]
    yield [range(place, place + 1) for place in range(len(rows))]


def _pieces(group: range, line: PackedRows, limit: int) -> Iterator[range]:
    """A group in pieces of at most `limit` tokens, but for rows that are longer."""
    begin, tokens, longest = group.start, 0, 0
    for place in group:
        row = line.rows[place]
        added = row.length - (row.shared if place > begin else 0)
        longest = max(longest, row.length)
        if place > begin and tokens + added > max(limit, longest):
            yield range(begin, place)
            begin, added, longest, tokens = place, row.length, row.length, 0
        tokens += added
    yield range(begin, group.stop)


def _cheapest(
    line: _Rows, cuts: Sequence[Sequence[range]], num_ranks: int, budget: int, at_least: int
) -> RowPlan:
    """The best of the plans for some ways to cut and numbers of micro-batches."""
    plans = [
        _dealt(micro_batches, line, num_ranks)
        for units in cuts
        for micro_batches in _fillings(line, units, num_ranks, budget, at_least)
    ]
    return min(plans, key=lambda plan: _badness(plan, line, at_least))


def _badness(plan: RowPlan, line: _Rows, at_least: int) -> tuple[int, float]:
    """Micro-batches that lack, then the cost of the step.

    A pipeline is idle for `at_least` micro-batches in all, the costliest in the worst case.
    """
    costs = [[line.cost(places) + line.pass_cost for places in share] for share in plan]
    most = max((each for share in costs for each in share), default=0.0)
    return max(0, at_least - max(map(len, plan))), lock_step(costs) + (at_least - 1) * most


def _fillings(
    line: _Rows, units: Sequence[range], num_ranks: int, budget: int, at_least: int
) -> Iterator[list[list[int]]]:
    """The micro-batches of a step, from as few as have room on."""
    least = -(-_least_tokens(line, units, budget) // (num_ranks * budget))
    found, most = 0, max(1, min(_MORE, _UNITS // max(len(units), 1)))
    for number in count(max(at_least, least, 1)):
        filled = _filled(line, units, number * num_ranks, budget) or _filled(
            line, units, number * num_ranks, budget, first_fit=True
        )
        if filled is not None:
            yield [each for each in filled if each]
            found += 1
        if found == most or (found and number * num_ranks >= len(units)):
            return


def _least_tokens(line: _Rows, units: Sequence[range], budget: int) -> int:
    """At least so many tokens share the budgets; what is too large for one has one."""
    over = sum(max(0, line.tokens(unit) - budget) for unit in units)
    everything = [place for unit in units for place in unit]
    packed = isinstance(line, PackedRows)
    return (line.tokens(everything) if packed else sum(map(line.tokens, units))) - over


class _Fillings:
    """Micro-batches that are being filled."""

    def __init__(self, line: _Rows, number: int, budget: int) -> None:
        self._line, self._budget = line, budget
        self.places: list[list[int]] = [[] for _ in range(number)]
        """Of each, the rows."""
        self._tokens = np.zeros(number, np.int64)
        self._costs = np.zeros(number, np.float64)
        self._of_group: dict[range, list[int]] = {}

    def add(self, unit: range, tokens: int, cost: float, *, first_fit: bool) -> bool:
        """Add a unit to the cheapest, or the first, that has room; whether one has.

        An empty one always has.
        """
        for number in self._tried(unit, tokens, first_fit):
            saved = self._line.saved(unit, self.places[number]) if self.places[number] else 0
            together = int(self._tokens[number]) + tokens - saved
            if together <= max(self._budget, tokens, self._tokens[number]):
                self.places[number] = sorted([*self.places[number], *unit])
                self._tokens[number] = together
                self._costs[number] += cost
                self._of_group.setdefault(self._line.group(unit), []).append(number)
                return True
        return False

    def _tried(self, unit: range, tokens: int, first_fit: bool) -> list[int]:
        """Those that may have room, in the order of the choice."""
        group = self._line.group(unit)
        most_saved = np.full(len(self.places), self._line.most_saved(group))
        most_saved[self._of_group.get(group, [])] = self._line.most_saved(unit)
        limits = np.maximum(self._tokens, max(self._budget, tokens))
        may = np.flatnonzero(self._tokens + tokens - most_saved <= limits)
        if not first_fit:
            may = may[np.argsort(self._costs[may], kind="stable")]
        found: list[int] = may.tolist()
        return found


def _filled(
    line: _Rows, units: Sequence[range], number: int, budget: int, *, first_fit: bool = False
) -> list[list[int]] | None:
    """The rows of so many micro-batches, by longest processing time; None: there is no room.

    Args:
        line: the rows.
        units: of rows that stay together.
        number: of micro-batches.
        budget: tokens of each.
        first_fit: into the first with room, largest first, which leaves less of the budgets.
    """
    sized = [(unit, line.tokens(unit), line.cost(unit)) for unit in units]
    sized.sort(key=lambda each: -each[1] if first_fit else -each[2])
    fillings = _Fillings(line, number, budget)
    fit = all(fillings.add(*each, first_fit=first_fit) for each in sized)
    return fillings.places if fit else None


def _dealt(micro_batches: Sequence[list[int]], line: _Rows, num_ranks: int) -> RowPlan:
    """Deal micro-batches to ranks, costliest first, so that those of a number are about equal.

    In serpentine order (0, 1, ..., n, n, ..., 1, 0, 0, ...), so that the sums of ranks are too.
    """
    order = sorted(micro_batches, key=lambda places: (-line.cost(places), places))
    plan: RowPlan = [[] for _ in range(num_ranks)]
    for start in range(0, len(order), num_ranks):
        seats = plan if start // num_ranks % 2 == 0 else plan[::-1]
        for share, places in zip(seats, order[start : start + num_ranks], strict=False):
            share.append(places)
    return plan


def _by_length(line: PaddedRows, num_ranks: int, budget: int) -> RowPlan:
    """Put rows of similar length together: the better of two ways.

    Either cut all rows into micro-batches and deal these, or deal rows and cut them on all ranks
    alike, which is better for few rows.
    """
    rounds = [_in_rounds(line, each, budget) for each in (1, num_ranks)]
    together = [places for share in rounds[0] for places in share]
    alike = [sorted(share, key=lambda places: -line.cost(places)) for share in rounds[1]]
    plans = [_dealt(together, line, num_ranks), alike]
    return min(plans, key=lambda plan: _badness(plan, line, 1))


def _in_rounds(line: PaddedRows, num_ranks: int, budget: int) -> RowPlan:
    """Deal rows to the ranks, longest first, and cut them into as many rows on every rank."""
    lengths = [row.length for row in line.rows]
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    rounds = [order[start : start + num_ranks] for start in range(0, len(order), num_ranks)]
    cuts = _cut([lengths[each[0]] for each in rounds], line, budget)
    plan: RowPlan = [
        [[each[rank] for each in rounds[cut] if rank < len(each)] for cut in cuts]
        for rank in range(num_ranks)
    ]
    return [[places for places in share if places] for share in plan]


def _cut(lengths: Sequence[int], line: PaddedRows, budget: int) -> list[slice]:
    """The cheapest split of lengths (longest first) into runs of at most `budget` padded tokens.

    Dynamic programming over the end of the last run.
    """
    cheapest, begins = [0.0], [0]
    for end in range(1, len(lengths) + 1):
        costs = []
        for begin in range(end - 1, -1, -1):
            if lengths[begin] * (end - begin) > budget and end - begin > 1:
                break
            run = line.cost_of_width(lengths[begin], end - begin) + line.pass_cost
            costs.append((cheapest[begin] + run, begin))
        cost, begin = min(costs)
        cheapest.append(cost)
        begins.append(begin)
    cuts = []
    end = len(lengths)
    while end:
        cuts.append(slice(begins[end], end))
        end = begins[end]
    return cuts[::-1]
