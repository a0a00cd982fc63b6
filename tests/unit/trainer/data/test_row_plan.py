"""Rows on ranks: the cost of a step in lock-step, and what a plan keeps."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.size.consecutive import plan_consecutive
from trainer.data.row_cost import LINEAR, RowCost
from trainer.data.row_plan import (
    PackedRows,
    PaddedRows,
    PlannedRow,
    RowPlan,
    lock_step,
    plan_packed,
    plan_padded,
)

QUADRATIC = RowCost(token_flops=100.0, output_flops=5.0, pairs=((0, 1.0), (16, 2.0)))


def make(
    lengths: list[int], group_size: int = 1, prompt: int = 0, first: int = 0
) -> list[PlannedRow]:
    """Rows of groups that begin with a prompt in common; lengths are those of the answers."""
    return [
        PlannedRow(
            number=first + n,
            group=n // group_size,
            length=prompt + length,
            outputs=length,
            shared=prompt if n % group_size else 0,
        )
        for n, length in enumerate(lengths)
    ]


def step_cost(plan: RowPlan, rows: list[PlannedRow], cost: RowCost) -> float:
    """What the ranks wait for, passes included."""
    packed = PackedRows(rows, cost)
    return lock_step(
        [[packed.cost(sorted(each)) + packed.pass_cost for each in share] for share in plan]
    )


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), max_size=40),
    group_size=st.integers(1, 5),
    prompt=st.sampled_from([0, 3, 40]),
    ranks=st.integers(1, 5),
    budget=st.integers(1, 200),
    packed=st.booleans(),
    whole=st.booleans(),
    at_least=st.integers(1, 3),
)
def test_a_plan_has_each_row_once_within_the_budget_and_costliest_first(
    lengths: list[int],
    group_size: int,
    prompt: int,
    ranks: int,
    budget: int,
    packed: bool,
    whole: bool,
    at_least: int,
) -> None:
    """Ranks differ by one micro-batch at most, groups are whole if asked for; twice is the same."""
    rows = make(lengths, group_size, prompt if packed else 0, first=7)
    plan_rows = plan_packed if packed else plan_padded
    costed = (PackedRows if packed else PaddedRows)(rows, QUADRATIC)

    def plan() -> RowPlan:
        return plan_rows(
            rows,
            QUADRATIC,
            num_ranks=ranks,
            budget=budget,
            whole_groups=whole,
            at_least=at_least,
        )

    found = plan()
    assert found == plan()
    counts = [len(share) for share in found]
    assert len(counts) == ranks
    assert max(counts) - min(counts) <= 1
    assert sorted(n for share in found for each in share for n in each) == [r.number for r in rows]
    for share in found:
        places = [sorted(number - 7 for number in each) for each in share]
        costs = [costed.cost(each) for each in places]
        assert costs == sorted(costs, reverse=True)
        for each in places:
            units = _units(rows, each, whole)
            assert costed.tokens(each) <= max(budget, *(costed.tokens(unit) for unit in units))
            if whole:
                groups = {rows[place].group for place in each}
                assert each == [n for n, row in enumerate(rows) if row.group in groups]
    if packed and not whole:
        assert max(counts) >= min(at_least, -(-len(rows) // ranks))


def _units(rows: list[PlannedRow], places: list[int], whole: bool) -> list[list[int]]:
    """What is never split."""
    key = (lambda place: rows[place].group) if whole else (lambda place: place)
    return [list(members) for _, members in groupby(places, key)]


@pytest.mark.parametrize("cost", [LINEAR, QUADRATIC])
@pytest.mark.parametrize("prompt", [0, 30])
def test_lock_step_costs_less_than_runs_of_consecutive_rows(cost: RowCost, prompt: int) -> None:
    """Of 300 small random steps; where ranks get a few rows each, rarely a little more."""
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(300):
        lengths = rng.integers(1, 60, rng.integers(1, 30)).tolist()
        rows = make(lengths, int(rng.integers(1, 6)), prompt)
        ranks, budget = int(rng.integers(1, 5)), int(rng.integers(60, 200))
        ours = plan_packed(rows, cost, num_ranks=ranks, budget=budget)
        theirs = plan_consecutive(rows, num_ranks=ranks, budget=budget)
        ratios.append(step_cost(ours, rows, cost) / step_cost(theirs, rows, cost))
    assert max(ratios) < 1.08
    assert np.mean(np.array(ratios) > 1.001) < 0.08
    assert np.mean(ratios) < 0.92


def test_rows_with_a_long_prompt_stay_together_if_that_is_cheaper() -> None:
    """Four groups on four ranks: each computes one prompt."""
    rows = make([10] * 16, group_size=4, prompt=500)
    plan = plan_packed(rows, LINEAR, num_ranks=4, budget=2_000)
    groups = [{rows[number].group for number in each} for share in plan for each in share]
    assert sorted(groups, key=min) == [{0}, {1}, {2}, {3}]


def test_a_group_is_split_if_the_ranks_would_wait_for_it() -> None:
    """Negative control: a short prompt is cheaper twice than a rank without work."""
    rows = make([100] * 8, group_size=8, prompt=4)
    plan = plan_packed(rows, LINEAR, num_ranks=2, budget=2_000)
    assert [[len(each) for each in share] for share in plan] == [[4], [4]]


@pytest.mark.parametrize(("length", "padded_to"), [(50, 100), (49, 49)])
def test_attention_of_rows_of_similar_length_costs_that_of_the_longest(
    length: int, padded_to: int
) -> None:
    """They are padded to it (`similar_rows`); shorter rows are computed by themselves."""
    cost = RowCost(token_flops=0.0, pairs=((0, 1.0),))
    pairs = [size * (size + 1) / 2 for size in (100, padded_to)]
    assert PackedRows(make([length, 100]), cost).cost([0, 1]) == sum(pairs)


def test_lock_step_waits_for_the_costliest_of_each_number() -> None:
    """Ranks with fewer micro-batches wait for the others."""
    assert lock_step([[5.0, 1.0], [3.0, 2.0], [4.0]]) == 7.0
    assert lock_step([[], []]) == 0.0
