"""The plan for a fused step: the best of the greedy schedule, the dispatch search and annealing."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

from trainer.pipeline.fused_schedule.dispatch import Rule, dispatch
from trainer.pipeline.fused_schedule.problem import (
    BACKWARD,
    FORWARD,
    Orders,
    Pipeline,
    Problem,
    lower_bound,
    timeline,
)
from trainer.pipeline.fused_schedule.task_graph import TaskGraph

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


_HOTTEST = 0.5
"""Highest temperature, in forward times of the first model."""
_TRIES_PER_PATH = 8


def anneal(
    problem: Problem, orders: Orders, cpu_seconds: float, seed: int = 0
) -> tuple[Orders, float]:
    """Improve a schedule by simulated annealing; the best one seen, and its time.

    Only a swap of neighbours on a longest path can make a schedule shorter (van Laarhoven, Aarts
    and Lenstra, 1992). A swap is given up as soon as one task would end later than is accepted. It
    ends early at the lower bound.
    """
    rng, bound, began = random.Random(seed), lower_bound(problem), time.process_time()
    graph = TaskGraph(problem, orders)
    best = orders, graph.seconds
    hottest = _HOTTEST * max(problem.pipelines[0].forward)
    while best[1] > bound:
        left = 1 - (time.process_time() - began) / cpu_seconds
        pairs = graph.swappable(rng) if left > 0 else []
        if not pairs:
            break
        _swap_one(graph, pairs, hottest * left, rng)
        if graph.seconds < best[1]:
            best = graph.orders(), graph.seconds
    return best


def _swap_one(
    graph: TaskGraph, pairs: list[tuple[int, int]], temperature: float, rng: random.Random
) -> None:
    """Make the first of some swaps that lengthens the schedule by no more than chance allows."""
    seconds = graph.seconds
    for first, second in rng.sample(pairs, min(_TRIES_PER_PATH, len(pairs))):
        longer = -temperature * math.log(max(rng.random(), 1e-12))
        if graph.swap(first, second, seconds + longer):
            return


_POOL = 24
_SAMPLED = 6
_NEW_SHARE = 0.1
_CHANGED_SHARE = 0.35
_STEPS = (0.3, 0.3, 0.3, 0.2, 0.2, 0.2, 0.2, 1.0, 1.0)
"""Standard deviations of the changes, by weight."""
_UNLIMITED = 99.0

_Weights = tuple[float, ...]


def search(problem: Problem, cpu_seconds: float, seed: int = 0) -> tuple[Orders, float]:
    """The best schedule found, and its time; it ends early at the lower bound.

    Hill climbing in a pool of rules: of a few drawn ones the best is changed a little.

    Args:
        cpu_seconds: at least one rule is tried.
    """
    rng, bound, end = random.Random(seed), lower_bound(problem), time.process_time() + cpu_seconds
    fresh = _fresh(rng, problem)
    pool: list[tuple[float, int, _Weights]] = []
    best: tuple[Orders, float] | None = None
    tries = 0
    while best is None or (best[1] > bound and time.process_time() < end):
        tries += 1
        weights = next(fresh) if _is_new(rng, pool) else _changed(rng, pool)
        orders, seconds = dispatch(problem, _rule(weights))
        pool = sorted([*pool, (seconds, tries, weights)])[:_POOL]
        if best is None or seconds < best[1]:
            best = orders, seconds
    return best


def _is_new(rng: random.Random, pool: list[tuple[float, int, _Weights]]) -> bool:
    return len(pool) < _POOL or rng.random() < _NEW_SHARE


def _fresh(rng: random.Random, problem: Problem) -> Iterator[_Weights]:
    """Rules that are often good, then random ones."""
    first, other = problem.pipelines[0], problem.pipelines[-1]
    even = first.seconds_alone / other.seconds_alone
    for weight, backward, offset in product((1.0, even), (0.0, 1.0), (0.0, _UNLIMITED)):
        yield (weight, backward, backward, 0.0, 1.0, 1.0, 1.0, offset, offset)
    while True:
        backward_shares = (rng.uniform(-1, 1.5), rng.uniform(-1, 1.5))
        slopes = (rng.uniform(0.3, 1.6), rng.uniform(0.3, 1.6))
        offsets = (rng.choice((0, 0, 1, 2, _UNLIMITED)), rng.choice((0, 0, 1, 2, _UNLIMITED)))
        others = (rng.uniform(-1, 1), rng.uniform(0, 1.5))
        yield (rng.uniform(0.3, 3), *backward_shares, *others, *slopes, *offsets)


def _changed(rng: random.Random, pool: list[tuple[float, int, _Weights]]) -> _Weights:
    weights = min(rng.sample(pool, _SAMPLED))[2]
    return tuple(
        each + rng.gauss(0, step) if rng.random() < _CHANGED_SHARE else each
        for each, step in zip(weights, _STEPS, strict=True)
    )


def _rule(weights: _Weights) -> Rule:
    weight, first, others, share, behind, slope_0, slope_1, offset_0, offset_1 = weights
    return Rule(
        weight=weight,
        backward_shares=(first, others),
        share=share,
        behind=behind,
        window_slopes=(slope_0, slope_1),
        window_offsets=(offset_0, offset_1),
    )


@dataclass(frozen=True, slots=True, order=True)
class _Candidate:
    """A task that can be scheduled next; ordered by start, then backward before forward."""

    start: float
    is_forward: bool
    node: int
    pipeline: int
    micro_batch: int
    kind: int = field(compare=False)
    end: float = field(compare=False)


def greedy(problem: Problem) -> Orders:
    """RLHFuse's greedy schedule (arXiv 2409.13221, section 5.2); it does not regard the capacity.

    The task that can start first, starts; at the same time, backward ones first. A task of another
    model than the first must end before the first model's next possible start on that node.
    """
    return _Greedy(problem).run()


class _Greedy:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._free_at = [0.0 for _ in problem.nodes]
        # Of each micro-batch: when its last task ends, and how many tasks it has behind it.
        self._ends = [[0.0] * each.num_micro_batches for each in problem.pipelines]
        self._passed = [[0] * each.num_micro_batches for each in problem.pipelines]
        self._counts = [[[0, 0] for _ in problem.pipelines] for _ in problem.nodes]
        self._valued: dict[tuple[int, int], float] = {}  # by pipeline and micro-batch
        self._orders: list[list[tuple[int, int]]] = [[] for _ in problem.nodes]

    def run(self) -> Orders:
        for _ in range(self._problem.num_tasks):
            self._schedule(min(self._allowed()))
        return self._orders

    def _allowed(self) -> Iterator[_Candidate]:
        candidates = list(self._candidates())
        first = [math.inf for _ in self._problem.nodes]
        for each in candidates:
            if each.pipeline == 0:
                first[each.node] = min(first[each.node], each.start)
        return (e for e in candidates if e.pipeline == 0 or e.end <= first[e.node])

    def _candidates(self) -> Iterator[_Candidate]:
        for index, pipeline in enumerate(self._problem.pipelines):
            for stage, node in enumerate(pipeline.nodes):
                for kind in (FORWARD, BACKWARD):
                    number = self._counts[node][index][kind]
                    behind = stage if kind == FORWARD else 2 * pipeline.num_stages - 1 - stage
                    if number == pipeline.num_micro_batches:
                        continue
                    valued = self._value_time(index, kind, stage, number)
                    if self._passed[index][number] != behind or valued is None:
                        continue
                    times = pipeline.forward if kind == FORWARD else pipeline.backward
                    start = max(self._ends[index][number], self._free_at[node], valued)
                    end = start + times[stage]
                    yield _Candidate(start, kind == FORWARD, node, index, number, kind, end)

    def _value_time(self, index: int, kind: int, stage: int, number: int) -> float | None:
        """From when on a task does not wait for a value; None: not yet known."""
        last = self._problem.pipelines[index].num_stages - 1
        if not self._problem.values or index or kind == FORWARD or stage != last:
            return 0.0
        return self._valued.get(self._problem.value_of(number))

    def _schedule(self, chosen: _Candidate) -> None:
        self._orders[chosen.node].append((chosen.pipeline, chosen.kind))
        if chosen.node == self._problem.pipelines[chosen.pipeline].nodes[-1] and chosen.is_forward:
            self._valued[chosen.pipeline, chosen.micro_batch] = chosen.end
        self._ends[chosen.pipeline][chosen.micro_batch] = chosen.end
        self._passed[chosen.pipeline][chosen.micro_batch] += 1
        self._counts[chosen.node][chosen.pipeline][chosen.kind] += 1
        self._free_at[chosen.node] = chosen.end
