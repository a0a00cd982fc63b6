"""Simulated annealing on the longest path, where the dispatch rule stops above the bound.

Only a swap of neighbours on a longest path can make a schedule shorter (van Laarhoven, Aarts and
Lenstra, 1992). A swap is given up as soon as one task would end later than is accepted.
"""

from __future__ import annotations

import math
import random
import time

from trainer.pipeline.fused_schedule.problem import Orders, Problem, lower_bound
from trainer.pipeline.fused_schedule.task_graph import TaskGraph

_HOTTEST = 0.5
"""Highest temperature, in forward times of the first model."""
_TRIES_PER_PATH = 8


def anneal(
    problem: Problem, orders: Orders, cpu_seconds: float, seed: int = 0
) -> tuple[Orders, float]:
    """Improve a schedule; the best one seen, and its time. It ends early at the lower bound."""
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
