"""Plans of fused steps, on RLHFuse's twelve settings (arXiv 2409.13221, table 3)."""

from __future__ import annotations

import dataclasses
import random

import pytest

from bench.fusion.settings import SETTINGS, Setting, fused_problem, serial_memory
from tests.lib.mostly_long import mostly_long
from trainer.pipeline.fused_schedule.dispatch import Rule, dispatch
from trainer.pipeline.fused_schedule.plan import anneal, fused_plan, greedy, serial_orders
from trainer.pipeline.fused_schedule.problem import (
    BACKWARD,
    FORWARD,
    DeadlockError,
    Orders,
    Pipeline,
    Problem,
    lower_bound,
    serial_seconds,
    timeline,
)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_serial_greedy_and_bound_are_those_of_the_paper(setting: Setting) -> None:
    """Three columns of table 3."""
    problem = setting.problem()
    assert serial_seconds(problem) == setting.serial
    assert timeline(problem, greedy(problem)).seconds == setting.greedy
    assert lower_bound(problem) == setting.bound


@pytest.mark.parametrize(
    "setting", mostly_long(SETTINGS, SETTINGS[0], SETTINGS[2], short=__file__), ids=str
)
def test_the_plan_reaches_the_bound(setting: Setting) -> None:
    """Without a capacity: also where the paper's own search stops at 613 of 606."""
    plan = fused_plan(setting.problem(), cpu_seconds=60.0)
    assert plan.seconds == plan.bound == setting.bound
    assert timeline(setting.problem(), plan.orders).seconds == setting.bound


@pytest.mark.parametrize("setting", SETTINGS[2::3], ids=str)
def test_a_plan_within_a_capacity_holds_no_more(setting: Setting) -> None:
    """The paper's memory; annealing keeps to it too."""
    problem = setting.problem()
    capacity = setting.paper_memory * serial_memory(problem) + 1e-6
    capped = dataclasses.replace(problem, capacity=capacity)
    plan = fused_plan(capped, cpu_seconds=0.5)
    assert plan.peak_bytes <= capacity
    assert plan.bound <= plan.seconds < setting.serial


def test_no_capacity_leads_to_a_deadlock() -> None:
    """Random rules under the tightest capacity place every task."""
    rng, problem = random.Random(0), SETTINGS[1].problem()
    tightest = max(sum(m.activation_bytes for m, _ in problem.on(v)) for v in problem.nodes)
    capped = dataclasses.replace(problem, capacity=tightest)
    for _ in range(50):
        rule = Rule(
            weight=rng.uniform(0.3, 3),
            backward_shares=(rng.uniform(-1, 1.5), rng.uniform(-1, 1.5)),
            share=rng.uniform(-1, 1),
            behind=rng.uniform(0, 1.5),
        )
        orders, seconds = dispatch(capped, rule)
        placed = timeline(capped, orders)
        assert placed.seconds == pytest.approx(seconds)
        assert placed.peak_bytes <= tightest


def test_a_capacity_below_one_micro_batch_of_each_is_refused() -> None:
    """It names what is needed."""
    with pytest.raises(ValueError, match=r"a node needs 3\.95"):
        dataclasses.replace(SETTINGS[0].problem(), capacity=3.9)


def test_stages_of_different_lengths() -> None:
    """A slow stage decides the time of its pipeline; the bound knows."""
    slow = Pipeline(
        nodes=(0, 1, 2), num_micro_batches=6, forward=(1.0, 3.0, 1.0), backward=(2.0, 6.0, 2.0)
    )
    assert slow.seconds_alone == 1 + 6 * 9 + 2
    plan = fused_plan(Problem(pipelines=(slow,)), cpu_seconds=5.0)
    assert plan.seconds == plan.bound == slow.seconds_alone


def test_serial_orders_are_one_forward_one_backward() -> None:
    """The critic waits behind the actor on each node, and overlaps at the seam only."""
    problem = SETTINGS[5].problem()
    placed = timeline(problem, serial_orders(problem))
    assert placed.seconds == 301 < serial_seconds(problem)
    assert placed.peak_bytes == pytest.approx(serial_memory(problem))


def test_orders_that_wait_for_each_other_are_a_deadlock() -> None:
    """Two pipelines in opposite directions, each node beginning with what needs the other."""
    ahead = Pipeline(nodes=(0, 1), num_micro_batches=1, forward=(1, 1), backward=(1, 1))
    back = dataclasses.replace(ahead, nodes=(1, 0))
    problem = Problem(pipelines=(ahead, back))
    all_of = [(i, kind) for kind in (FORWARD, BACKWARD) for i in (0, 1)]
    timeline(problem, [all_of, all_of])
    with pytest.raises(DeadlockError):
        timeline(problem, [[(1, FORWARD), *all_of[:1]], [(0, FORWARD), (1, FORWARD)]])


def test_annealing_never_makes_a_schedule_worse() -> None:
    """And what it returns is a schedule of that time."""
    problem = SETTINGS[0].problem()
    orders = serial_orders(problem)
    before = timeline(problem, orders).seconds
    better, seconds = anneal(problem, orders, cpu_seconds=0.3)
    assert seconds < before
    assert timeline(problem, better).seconds == seconds


def test_replicas_must_cover_the_actor() -> None:
    """Three stages of a critic do not divide eight."""
    actor = SETTINGS[0].problem().pipelines[0]
    critic = Pipeline(nodes=(0, 1, 2), num_micro_batches=4, forward=(1,) * 3, backward=(2,) * 3)
    with pytest.raises(ValueError, match="2 critics of 3 stages do not cover 8 stages"):
        fused_problem(actor, critic, num_replicas=2)


@pytest.mark.parametrize("setting", [SETTINGS[5], SETTINGS[1]], ids=str)
def test_a_backward_that_waits_for_values_costs_nothing(setting: Setting) -> None:
    """Also with replicas; the plan is as short as without values, and keeps their order."""
    problem = dataclasses.replace(setting.problem(), values=True)
    plan = fused_plan(problem, cpu_seconds=60.0)
    assert plan.seconds == setting.bound
    assert values_come_first(problem, plan.orders)
    assert values_come_first(problem, serial_orders(problem))


def test_an_order_that_ignores_values_is_a_deadlock() -> None:
    """Negative control: the actor before the critic, which is right without values."""
    problem = SETTINGS[5].problem()
    orders = serial_orders(problem)
    assert not values_come_first(problem, orders)
    with pytest.raises(DeadlockError):
        timeline(dataclasses.replace(problem, values=True), orders)


def test_the_others_have_the_micro_batches_of_the_first() -> None:
    """A value for each of them, and no more."""
    problem = SETTINGS[0].problem()
    short = dataclasses.replace(problem.pipelines[1], num_micro_batches=15)
    with pytest.raises(ValueError, match="have 31 micro-batches: give the first one's 32"):
        dataclasses.replace(
            problem, pipelines=(problem.pipelines[0], short, problem.pipelines[2]), values=True
        )


def test_no_capacity_leads_to_a_deadlock_of_values() -> None:
    """Random rules under the tightest capacity place every task."""
    rng, problem = random.Random(1), SETTINGS[1].problem()
    tightest = max(sum(m.activation_bytes for m, _ in problem.on(v)) for v in problem.nodes)
    capped = dataclasses.replace(problem, capacity=tightest, values=True)
    for _ in range(30):
        rule = Rule(weight=rng.uniform(0.3, 3), share=rng.uniform(-1, 1), behind=rng.uniform(0, 1))
        orders, seconds = dispatch(capped, rule)
        assert timeline(capped, orders).seconds == pytest.approx(seconds)


def values_come_first(problem: Problem, orders: Orders) -> bool:
    """Whether each backward of the first model's last stage starts after its value is there."""
    tasks = timeline(problem, orders).tasks
    last = {index: each.nodes[-1] for index, each in enumerate(problem.pipelines)}
    at_last = [task for task in tasks if task.node == last[task.pipeline]]
    ends = {(t.pipeline, t.micro_batch): t.end for t in at_last if t.kind == FORWARD}
    return all(
        ends[problem.value_of(task.micro_batch)] <= task.start
        for task in at_last
        if task.pipeline == 0 and task.kind == BACKWARD
    )
