"""List scheduling: a node that becomes free starts the ready task of greatest priority.

The priority of a task is the time left on its own micro-batch's way and on those behind it, weighed
by `Rule`. A forward task starts only if what it will hold leaves room for one micro-batch of every
other model of the node that holds none: so the deepest micro-batch of each model can always go on,
and no capacity leads to a deadlock.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from trainer.pipeline.fused_schedule.problem import BACKWARD, FORWARD, Orders, Pipeline, Problem

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Weights of the priorities. Shares are of a pass of the first model over all nodes."""

    weight: float = 1.0
    """Of the other models' remaining time, next to the first model's."""
    backward_shares: tuple[float, float] = (0.0, 0.0)
    """Added to backward tasks: of the first model, of the others."""
    share: float = 0.0
    """Added to all tasks of the other models."""
    behind: float = 1.0
    """Weight of the time of the micro-batches behind."""
    window_slopes: tuple[float, float] = (1.0, 1.0)
    """Micro-batches in flight that a stage may have, for each stage from it to the last: of the
    first model, of the others."""
    window_offsets: tuple[float, float] = (math.inf, math.inf)
    """Added to them; infinite: no limit."""


def dispatch(problem: Problem, rule: Rule) -> tuple[Orders, float]:
    """The schedule by a rule, within the capacity, and its time."""
    return _Dispatch(problem, rule).run()


class _Stage:
    """A stage of a model on a node, with what has started there and what may."""

    def __init__(self, problem: Problem, index: int, stage: int, rule: Rule) -> None:
        pipeline = problem.pipelines[index]
        other = index > 0
        self.index, self.stage, self.pipeline = index, stage, pipeline
        self.times = (pipeline.forward[stage], pipeline.backward[stage])
        self.next_node = pipeline.nodes[stage + 1] if stage + 1 < pipeline.num_stages else None
        self.previous_node = pipeline.nodes[stage - 1] if stage else None
        self.started = [0, 0]
        self.ready = [0 if stage else pipeline.num_micro_batches, 0]
        self.window = _window(pipeline, stage, rule, other)
        self.base, self.slope = _priorities(problem, pipeline, stage, rule, other)

    @property
    def in_flight(self) -> int:
        return self.started[FORWARD] - self.started[BACKWARD]

    def has_ready(self, kind: int) -> bool:
        return self.started[kind] < self.ready[kind]

    def priority(self, kind: int) -> float:
        behind = self.pipeline.num_micro_batches - 1 - self.started[kind]
        return self.base[kind] + self.slope * behind


def _window(pipeline: Pipeline, stage: int, rule: Rule, other: bool) -> float:
    left = pipeline.num_stages - stage
    offset = rule.window_offsets[other]
    return max(1.0, rule.window_slopes[other] * left + offset)


def _priorities(
    problem: Problem, pipeline: Pipeline, stage: int, rule: Rule, other: bool
) -> tuple[tuple[float, float], float]:
    first = problem.pipelines[0]
    unit = (first.forward[0] + first.backward[0]) * len(problem.nodes)
    weight = rule.weight if other else 1.0
    added = rule.share * unit if other else 0.0
    way_out = sum(pipeline.backward[: stage + 1])
    way = sum(pipeline.forward[stage:]) + sum(pipeline.backward)
    backward = weight * way_out + added + rule.backward_shares[other] * unit
    slope = weight * rule.behind * (pipeline.forward[stage] + pipeline.backward[stage])
    return (weight * way + added, backward), slope


class _Dispatch:
    def __init__(self, problem: Problem, rule: Rule) -> None:
        self._capacity = problem.capacity + _ROUNDING
        self._at: list[dict[int, _Stage]] = [{} for _ in problem.nodes]
        for index, pipeline in enumerate(problem.pipelines):
            for stage, node in enumerate(pipeline.nodes):
                self._at[node][index] = _Stage(problem, index, stage, rule)
        self._values = problem.values
        self._passed = [0 for _ in problem.pipelines]  # micro-batches that are at their turn
        self._last = self._at[problem.pipelines[0].nodes[-1]][0]
        self._held = [0.0 for _ in problem.nodes]
        self._is_busy = [False for _ in problem.nodes]
        self._orders: list[list[tuple[int, int]]] = [[] for _ in problem.nodes]
        self._running: list[tuple[float, int, int, int]] = []
        self._now = 0.0

    def run(self) -> tuple[Orders, float]:
        for node in range(len(self._at)):
            self._start(node)
        while self._running:
            self._now = self._running[0][0]
            touched: set[int] = set()
            while self._running and self._running[0][0] == self._now:
                _, node, index, kind = heapq.heappop(self._running)
                touched.update(self._finish(node, index, kind))
            for node in sorted(touched):
                if not self._is_busy[node]:
                    self._start(node)
        return self._orders, self._now

    def _finish(self, node: int, index: int, kind: int) -> tuple[int, int]:
        """Free the node and pass the micro-batch on; the nodes that may start something now."""
        self._is_busy[node] = False
        stage = self._at[node][index]
        to = stage.next_node if kind == FORWARD else stage.previous_node
        if to is None and kind == FORWARD:
            to = self._turn(stage)
        elif to is not None:
            self._at[to][index].ready[kind] += 1
        return node, node if to is None else to

    def _turn(self, stage: _Stage) -> int | None:
        """Let what has passed the last stage go back; another node where that allows something."""
        self._passed[stage.index] += 1
        if stage.index or not self._values:
            stage.ready[BACKWARD] += 1
        if not self._values:
            return None
        self._last.ready[BACKWARD] = min(self._passed[0], self._num_valued())
        return self._last.pipeline.nodes[-1]

    def _num_valued(self) -> int:
        """Micro-batches of the first model, from the first on, whose value is there."""
        _, *others = self._passed
        return min(turns * len(others) + index for index, turns in enumerate(others))

    def _start(self, node: int) -> None:
        best: tuple[float, int, int] | None = None
        for index, stage in self._at[node].items():
            for kind in (BACKWARD, FORWARD):
                if stage.has_ready(kind) and (kind == BACKWARD or self._fits(node, stage)):
                    found = (stage.priority(kind), index, kind)
                    best = found if best is None or found[0] > best[0] else best
        if best is not None:
            self._place(node, best[1], best[2])

    def _fits(self, node: int, stage: _Stage) -> bool:
        """Within the window, and with room left for one micro-batch of models that hold none."""
        if stage.in_flight >= stage.window:
            return False
        reserved = sum(
            other.pipeline.activation_bytes
            for other in self._at[node].values()
            if other is not stage
            and not other.in_flight
            and other.started[FORWARD] < other.pipeline.num_micro_batches
        )
        needed = self._held[node] + stage.pipeline.activation_bytes + reserved
        return needed <= self._capacity

    def _place(self, node: int, index: int, kind: int) -> None:
        stage = self._at[node][index]
        stage.started[kind] += 1
        size = stage.pipeline.activation_bytes
        self._held[node] += size if kind == FORWARD else -size
        self._is_busy[node] = True
        self._orders[node].append((index, kind))
        end = self._now + stage.times[kind]
        heapq.heappush(self._running, (end, node, index, kind))
