"""The plan for a fused step: the best of the greedy schedule, the dispatch search and annealing."""

from __future__ import annotations

import time
from dataclasses import dataclass

from trainer.pipeline.fused_schedule.annealing import anneal
from trainer.pipeline.fused_schedule.dispatch import Rule, dispatch
from trainer.pipeline.fused_schedule.greedy import greedy
from trainer.pipeline.fused_schedule.problem import (
    BACKWARD,
    FORWARD,
    Orders,
    Pipeline,
    Problem,
    lower_bound,
)
from trainer.pipeline.fused_schedule.search import search
from trainer.pipeline.fused_schedule.timeline import timeline

_ROUNDS = (0.02, 0.1, 0.88)
"""Shares of the CPU seconds: easy problems need neither a long search nor long annealing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedPlan:
    """A schedule within the capacity."""

    orders: Orders
    seconds: float
    peak_bytes: float
    found_by: str
    """greedy, dispatch or annealing."""
    bound: float
    """No schedule is shorter; reached, the plan is optimal."""
    cpu_seconds: float
    """What the search took."""


def fused_plan(problem: Problem, cpu_seconds: float = 10.0, seed: int = 0) -> FusedPlan:
    """Search for the shortest schedule, for about so many CPU seconds; it ends at the bound."""
    began, bound = time.process_time(), lower_bound(problem)
    best = _first(problem)
    for number, share in enumerate(_ROUNDS):
        for improve in (_dispatched, _annealed):
            if best.seconds > bound:
                found = improve(problem, best, share * cpu_seconds / 2, seed + number)
                best = min(best, found, key=lambda each: each.seconds)
    return FusedPlan(
        orders=best.orders,
        seconds=best.seconds,
        peak_bytes=timeline(problem, best.orders).peak_bytes,
        found_by=best.found_by,
        bound=bound,
        cpu_seconds=time.process_time() - began,
    )


@dataclass(frozen=True, slots=True)
class _Found:
    orders: Orders
    seconds: float
    found_by: str


def _first(problem: Problem) -> _Found:
    """The greedy schedule, or one of the dispatch rule if that holds too much."""
    orders = greedy(problem)
    placed = timeline(problem, orders)
    if placed.peak_bytes <= problem.capacity:
        return _Found(orders, placed.seconds, "greedy")
    return _Found(*dispatch(problem, Rule()), "dispatch")


def _dispatched(problem: Problem, _: _Found, cpu_seconds: float, seed: int) -> _Found:
    return _Found(*search(problem, cpu_seconds, seed), "dispatch")


def _annealed(problem: Problem, best: _Found, cpu_seconds: float, seed: int) -> _Found:
    """From the best, and from the greedy schedule, which is often nearer to the optimum."""
    starts = {start.found_by: start for start in (_first(problem), best)}
    orders = [start.orders for start in starts.values()]
    found = [anneal(problem, each, cpu_seconds / len(orders), seed) for each in orders]
    return _Found(*min(found, key=lambda each: each[1]), "annealing")


def serial_orders(problem: Problem) -> Orders:
    """1F1B of the first model, and behind it that of the others: plain pipelines.

    If the first waits for the values of the others, it comes last.
    """
    orders: list[list[tuple[int, int]]] = [[] for _ in problem.nodes]
    models = sorted(enumerate(problem.pipelines), key=lambda each: problem.values and not each[0])
    for index, pipeline in models:
        for stage, node in enumerate(pipeline.nodes):
            orders[node] += [(index, kind) for kind in _one_forward_one_backward(pipeline, stage)]
    return orders


def _one_forward_one_backward(pipeline: Pipeline, stage: int) -> list[int]:
    number = pipeline.num_micro_batches
    ahead = min(number, pipeline.num_stages - stage)
    steady = [BACKWARD, FORWARD] * (number - ahead)
    return [FORWARD] * ahead + steady + [BACKWARD] * ahead
