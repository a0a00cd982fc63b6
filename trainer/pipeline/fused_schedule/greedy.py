"""RLHFuse's greedy schedule (arXiv 2409.13221, section 5.2): the task that can start first, starts.

Of tasks that can start at the same time, backward ones come first. A task of another model than the
first must end before the first model's next possible start on that node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from trainer.pipeline.fused_schedule.problem import BACKWARD, FORWARD, Orders, Problem


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
    """The schedule; it does not regard the capacity."""
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
