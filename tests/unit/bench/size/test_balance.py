"""Steps of real size: the trainer's plan next to the one it had."""

from __future__ import annotations

from functools import partial

import pytest

from bench.size.balance import CASES, balance, make_rows, step_over_ideal
from trainer.data.row_cost import LINEAR
from trainer.data.row_plan import PlannedRow, RowPlan, plan_packed


def test_steps_are_near_the_ideal_and_were_not() -> None:
    """The target is 1.15; the plan of consecutive rows is the negative control."""
    figures = balance([0]).figures
    for case in CASES:
        assert 1.0 <= figures[f"step_over_ideal_{case.name}"] < 1.15
        assert figures[f"consecutive_over_ideal_{case.name}"] > 1.4


def test_a_plan_by_tokens_alone_is_noticed() -> None:
    """Negative control: attention is a third of the cost of long rows."""
    case = CASES[-1]
    cost, rows = case.cost(), make_rows(0)
    found = [
        step_over_ideal(
            rows,
            cost,
            case.num_ranks,
            partial(plan_packed, cost=planned, num_ranks=case.num_ranks, budget=32_768),
        )
        for planned in (cost, LINEAR)
    ]
    assert found[1] > found[0] + 0.02


def test_a_step_of_equal_shares_is_the_ideal_one() -> None:
    """One rank has all; two ranks of which one has all take twice as long."""
    rows = [PlannedRow(number=n, group=n, length=1_000, outputs=999) for n in range(8)]
    cost = CASES[0].cost()

    def together(given: object) -> RowPlan:
        return [[[row.number for row in rows]]]

    assert step_over_ideal(rows, cost, 1, together) == pytest.approx(1.0)
    assert step_over_ideal(rows, cost, 2, together) == pytest.approx(2.0)
