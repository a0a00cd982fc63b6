"""What the emulated agents do."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean, median, pvariance

import pytest

from bench.sim.workloads import Workload, load_workloads
from tests.lib.bench_sim.support import AGENTIC, SINGLE

WORKLOADS = load_workloads()
CONTROL = {0.0: 0.1, 0.7: 0.1, 1.0: 1e-3}
"""Share of variance that groups have in common -> tolerance of its estimate."""


def lengths(workload: Workload, groups: int) -> list[list[int]]:
    """Output tokens of the rollouts, by group."""
    return [[plan.output_tokens for plan in workload.group(0, n)] for n in range(groups)]


@pytest.mark.parametrize("workload", [*WORKLOADS.values(), SINGLE, AGENTIC], ids=lambda w: w.name)
def test_a_group_is_a_function_of_seed_and_number(workload: Workload) -> None:
    """The same again whatever was drawn before it; another seed, number or workload is another."""
    first = workload.group(3, 5)
    workload.group(3, 6)
    assert workload.group(3, 5) == first
    assert len(first) == workload.group_size
    others = [workload.group(4, 5), workload.group(3, 6), replace(workload, name="x").group(3, 5)]
    assert first not in others


@pytest.mark.parametrize("name", WORKLOADS)
def test_nothing_is_longer_than_it_may_be(name: str) -> None:
    """Outputs, tool times, turns and contexts; the last turn has no tool after it."""
    workload = WORKLOADS[name]
    for plan in (plan for number in range(60) for plan in workload.group(0, number)):
        assert 1 <= len(plan.turns) <= workload.most_turns
        assert plan.tokens <= workload.most_context
        assert all(1 <= turn.output_tokens <= workload.output_tokens.most for turn in plan.turns)
        assert all(turn.tool_seconds <= workload.tool_seconds.most for turn in plan.turns)
        assert plan.turns[0].new_tokens == workload.prompt_tokens
        assert {turn.new_tokens for turn in plan.turns[1:]} <= {workload.tool_tokens}


def test_a_rollout_that_would_grow_too_long_ends_before() -> None:
    """Fewer turns than drawn, but never none."""
    short = replace(AGENTIC, most_context=700)
    plans = [plan for number in range(40) for plan in short.group(0, number)]
    whole = [plan for number in range(40) for plan in AGENTIC.group(0, number)]
    assert all(plan.tokens <= 700 or len(plan.turns) == 1 for plan in plans)
    assert sum(len(plan.turns) for plan in plans) < sum(len(plan.turns) for plan in whole)


@pytest.mark.parametrize("share", CONTROL)
def test_a_group_shares_as_much_of_the_variance_as_it_says(share: float) -> None:
    """Mean of the variances within groups, of the logarithm, beside the whole variance."""
    output = replace(SINGLE.output_tokens, median=1e5, most=math.inf, prompt_share=share)
    workload = replace(SINGLE, output_tokens=output, group_size=16)
    logs = [[math.log(length) for length in group] for group in lengths(workload, 400)]
    within = fmean(pvariance(group) * 16 / 15 for group in logs)
    assert 1 - within / output.sigma**2 == pytest.approx(share, abs=CONTROL[share])


@pytest.mark.parametrize("name", ["single_turn_8k", "single_turn_20k"])
def test_the_tail_is_as_long_as_the_source_says(name: str) -> None:
    """The 99.9th percentile of the outputs is about ten times the median."""
    drawn = sorted(length for group in lengths(WORKLOADS[name], 1000) for length in group)
    assert median(drawn) == pytest.approx(WORKLOADS[name].output_tokens.median, rel=0.1)
    assert drawn[round(0.999 * len(drawn))] / median(drawn) == pytest.approx(10, rel=0.2)
