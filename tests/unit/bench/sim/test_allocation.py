"""Nodes that move next to fixed splits: what is compared."""

from __future__ import annotations

import pytest

from bench.sim.allocation import NODES, Rates, compared, drifting_setting, rates


def test_lengths_double_once_and_training_has_less_than_twice_the_work() -> None:
    """From the batch of the change on; so the best split is another one."""
    workload = drifting_setting(0).workload
    change = 24 * workload.groups_per_step

    def mean(first: int) -> tuple[float, float]:
        plans = [plan for n in range(first, first + 100) for plan in workload.group(0, n)]
        sampled = sum(plan.output_tokens for plan in plans)
        return sampled / len(plans), sum(plan.tokens for plan in plans) / len(plans)

    (sampled, all_tokens), (doubled, more) = mean(change - 100), mean(change)
    assert doubled / sampled == pytest.approx(2, rel=0.1)
    assert more / all_tokens < 1.5


def test_rates_are_of_the_steps_that_count() -> None:
    """A step of ten seconds before the change, of twenty after it."""
    ends = [10.0 * step for step in range(1, 25)]
    ends += [240.0 + 20.0 * step for step in range(1, 31)]
    assert rates(ends, 100) == Rates(before=10, after=5, whole=52 * 100 / 820)


def test_moving_nodes_are_compared_with_the_best_split_of_each_phase() -> None:
    """Which no fixed split is in both."""
    found = {number: Rates(before=1, after=1, whole=1) for number in range(1, NODES)}
    found |= {3: Rates(before=4, after=2, whole=3), 5: Rates(before=2, after=5, whole=3)}
    figures = compared(found | {0: Rates(before=4, after=5, whole=4.5)}, 2)
    assert figures == {
        "moves": 2,
        "before_vs_best_fixed": 1,
        "before_vs_worst_fixed": 4,
        "after_vs_best_fixed": 1,
        "after_vs_worst_fixed": 5,
        "whole_vs_best_fixed": 1.5,
        "whole_vs_worst_fixed": 4.5,
    }
