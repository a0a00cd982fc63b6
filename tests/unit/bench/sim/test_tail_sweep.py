"""R_t at run time: what its measurement compares."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.sim import tail_sweep
from bench.sim.lending_grid import scaled
from bench.sim.tail_sweep import COMPUTED, Repeated, figures, step_seconds
from bench.sim.workloads import Workload
from tests.lib.bench_sim.support import SINGLE

WARM_UP, ROUNDS = 2, 2


def repeated(repeats: int, num_before: int = ROUNDS) -> Repeated:
    """The small workload, and then the same twice as long."""
    fields = {name: getattr(SINGLE, name) for name in Workload.__dataclass_fields__}
    return Repeated(
        **fields,
        before=SINGLE,
        after=replace(scaled(SINGLE, 2.0), name=SINGLE.name),
        num_before=num_before,
        repeats=repeats,
        warm_up=WARM_UP,
    )


def lengths(workload: Repeated, step: int) -> list[int]:
    """Of all rollouts of a step."""
    first = step * workload.groups_per_step
    groups = range(first, first + workload.groups_per_step)
    return [plan.output_tokens for n in groups for plan in workload.group(0, n)]


def test_all_starts_of_a_round_get_the_same_rollouts() -> None:
    """Another round has others, and so has the warm-up."""
    workload = repeated(3)
    first, second = [lengths(workload, WARM_UP + step) for step in (0, 3)]
    assert first == lengths(workload, WARM_UP + 1) == lengths(workload, WARM_UP + 2)
    assert second == lengths(workload, WARM_UP + 5)
    warm_up = [lengths(workload, step) for step in range(WARM_UP)]
    batches = [first, second, *warm_up]
    assert all(one != other for i, one in enumerate(batches) for other in batches[:i])


def test_lengths_double_in_the_middle() -> None:
    """The same draws, twice as long."""
    changed, unchanged = repeated(3, num_before=0), repeated(3)
    long, short = lengths(changed, WARM_UP), lengths(unchanged, WARM_UP)
    assert sum(long) == pytest.approx(2 * sum(short), rel=0.01)


def test_seconds_are_those_of_each_start_before_and_after() -> None:
    """The computed start is compared with the best fixed one of the same phase."""
    starts = tail_sweep.starts(ROUNDS)
    assert starts[:WARM_UP] == (32, 32)
    assert starts.count(COMPUTED) == 2 * ROUNDS
    num_each = len(set(starts))
    assert all(set(starts[i : i + num_each]) == set(starts) for i in (2, 2 + num_each))
    assert starts[WARM_UP] == COMPUTED, "it has seen earlier batches only"
    ends = [0.0]
    for step, start in enumerate(starts[1:], start=1):
        after = step >= WARM_UP + ROUNDS * num_each
        took = 100.0 if start == COMPUTED else 90.0 + abs(start - (26 if after else 14))
        ends.append(ends[-1] + took)
    found = figures(step_seconds(ends, starts, ROUNDS))
    assert found["before.computed_vs_best_fixed"] == pytest.approx(0.9)
    assert found["after.computed_vs_best_fixed"] == pytest.approx(0.9)
    assert (found["before.best_fixed_start"], found["after.best_fixed_start"]) == (14, 26)
    assert found["before.computed_vs_whole_batch"] == pytest.approx(1.08)
    assert found["before.computed.rollouts_per_second"] == pytest.approx(1.28)
