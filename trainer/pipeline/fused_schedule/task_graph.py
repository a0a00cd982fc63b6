"""The tasks of a schedule as a graph that can be changed step by step.

A task waits for the one before it on its micro-batch's way (`way_before`), for the one before it on
its node (`node_before`), and maybe for a value (`value_before`). Its start is the length of the
longest path to it.
"""

from __future__ import annotations

import heapq
import random

from trainer.pipeline.fused_schedule.problem import BACKWARD, FORWARD, Orders, Problem

_NONE = -1
_ROUNDING = 1e-9


class TaskGraph:
    """A schedule; tasks are numbered, with each attribute a list by task."""

    def __init__(self, problem: Problem, orders: Orders) -> None:
        self._problem = problem
        self._tasks: list[tuple[int, int]] = []  # (model, kind)
        self._nodes: list[int] = []
        self._times: list[float] = []
        self._bytes: list[float] = []
        self._rest: list[float] = []  # time from a task's start to the end of its micro-batch
        self._way_before: list[int] = []
        self._way_after: list[int] = []
        self._ends: list[int] = []  # the last task of each micro-batch
        numbers = self._add_tasks()
        self._value_before = [_NONE] * len(self._tasks)
        self._value_after = [_NONE] * len(self._tasks)
        self._add_values(numbers)
        self._node_before = [_NONE] * len(self._tasks)
        self._node_after = [_NONE] * len(self._tasks)
        self._held = [0.0] * len(self._tasks)  # on the node, once a task has started or ended
        self._add_orders(orders, numbers)
        self._starts = self._longest_paths()

    def _add_tasks(self) -> dict[tuple[int, int, int, int], int]:
        numbers: dict[tuple[int, int, int, int], int] = {}
        for index, pipeline in enumerate(self._problem.pipelines):
            forward = [(FORWARD, stage) for stage in range(pipeline.num_stages)]
            way = forward + [(BACKWARD, stage) for _, stage in reversed(forward)]
            for number in range(pipeline.num_micro_batches):
                for kind, stage in way:
                    numbers[index, kind, number, stage] = self._add_task(index, kind, stage)
                self._way_after[-1] = _NONE
                self._ends.append(len(self._tasks) - 1)
        return numbers

    def _add_task(self, index: int, kind: int, stage: int) -> int:
        pipeline, task = self._problem.pipelines[index], len(self._tasks)
        is_first = (kind, stage) == (FORWARD, 0)
        self._tasks.append((index, kind))
        self._nodes.append(pipeline.nodes[stage])
        self._times.append((pipeline.forward, pipeline.backward)[kind][stage])
        size = pipeline.activation_bytes
        self._bytes.append(size if kind == FORWARD else -size)
        back = sum(pipeline.backward[: stage + 1])
        whole = sum(pipeline.forward[stage:]) + sum(pipeline.backward)
        self._rest.append(whole if kind == FORWARD else back)
        self._way_before.append(_NONE if is_first else task - 1)
        self._way_after.append(task + 1)
        return task

    def _add_values(self, numbers: dict[tuple[int, int, int, int], int]) -> None:
        first = self._problem.pipelines[0]
        for number in range(first.num_micro_batches if self._problem.values else 0):
            index, turn = self._problem.value_of(number)
            last = self._problem.pipelines[index].num_stages - 1
            value = numbers[index, FORWARD, turn, last]
            task = numbers[0, BACKWARD, number, first.num_stages - 1]
            self._value_before[task], self._value_after[value] = value, task

    def _add_orders(self, orders: Orders, numbers: dict[tuple[int, int, int, int], int]) -> None:
        for node, order in enumerate(orders):
            counts: dict[tuple[int, int], int] = {}
            before, held = _NONE, 0.0
            for index, kind in order:
                number = counts.get((index, kind), 0)
                counts[index, kind] = number + 1
                stage = self._problem.pipelines[index].nodes.index(node)
                task = numbers[index, kind, number, stage]
                held += self._bytes[task]
                self._held[task], self._node_before[task] = held, before
                if before != _NONE:
                    self._node_after[before] = task
                before = task

    @property
    def seconds(self) -> float:
        """When the last task ends."""
        return max(self._starts[task] + self._times[task] for task in self._ends)

    def orders(self) -> Orders:
        found: list[list[tuple[int, int]]] = [[] for _ in self._problem.nodes]
        firsts = [task for task, before in enumerate(self._node_before) if before == _NONE]
        for first in firsts:
            task = first
            while task != _NONE:
                found[self._nodes[first]].append(self._tasks[task])
                task = self._node_after[task]
        return found

    def swappable(self, rng: random.Random) -> list[tuple[int, int]]:
        """Neighbours on a node that follow each other on a longest path, and may change places."""
        path = self._longest_path(rng)
        pairs = zip(path[1:], path, strict=False)
        return [
            pair for pair in pairs if self._node_after[pair[0]] == pair[1] and self._legal(*pair)
        ]

    def swap(self, first: int, second: int, limit: float) -> bool:
        """Let neighbours change places, unless the schedule then ends after `limit`: False."""
        self._exchange(first, second)
        changed = self._propagated(first, second, limit)
        if changed is None:
            self._exchange(second, first)
            return False
        before = self._held[first] - self._bytes[first]
        self._held[second] = before + self._bytes[second]
        self._held[first] = self._held[second] + self._bytes[first]
        return True

    def _legal(self, first: int, second: int) -> bool:
        """Not two of a kind, nor of one micro-batch, and within the capacity."""
        if self._tasks[first] == self._tasks[second]:
            return False
        if first in (self._way_before[second], self._value_before[second]):
            return False
        held = self._held[first] - self._bytes[first] + self._bytes[second]
        return held <= self._problem.capacity + _ROUNDING

    def _exchange(self, first: int, second: int) -> None:
        before, after = self._node_before[first], self._node_after[second]
        self._node_before[second], self._node_after[second] = before, first
        self._node_before[first], self._node_after[first] = second, after
        if before != _NONE:
            self._node_after[before] = second
        if after != _NONE:
            self._node_before[after] = first

    def _propagated(self, first: int, second: int, limit: float) -> dict[int, float] | None:
        """Renew starts from the swapped pair on; None, with all as before, beyond the limit.

        A cycle grows without end, so the limit catches it too.
        """
        old: dict[int, float] = {}
        waiting = [(self._starts[first], second), (self._starts[second], first)]
        if (after := self._node_after[first]) != _NONE:
            waiting.append((self._starts[after], after))
        heapq.heapify(waiting)
        while waiting:
            _, task = heapq.heappop(waiting)
            start = self._earliest(task)
            if start == self._starts[task]:
                continue
            if start + self._rest[task] > limit:
                for each, value in old.items():
                    self._starts[each] = value
                return None
            old.setdefault(task, self._starts[task])
            self._starts[task] = start
            for after in self._after(task):
                if after != _NONE:
                    heapq.heappush(waiting, (max(start, self._starts[after]), after))
        return old

    def _earliest(self, task: int) -> float:
        starts, times, latest = self._starts, self._times, 0.0
        for before in self._all_before(task):
            if before != _NONE and starts[before] + times[before] > latest:
                latest = starts[before] + times[before]
        return latest

    def _longest_path(self, rng: random.Random) -> list[int]:
        """From an end to the beginning."""
        last = self.seconds
        task = rng.choice([e for e in self._ends if self._starts[e] + self._times[e] == last])
        path = [task]
        while self._starts[task] > 0:
            task = rng.choice([b for b in self._before(task) if self._holds_up(b, task)])
            path.append(task)
        return path

    def _before(self, task: int) -> list[int]:
        return [each for each in self._all_before(task) if each != _NONE]

    def _all_before(self, task: int) -> tuple[int, int, int]:
        return self._way_before[task], self._node_before[task], self._value_before[task]

    def _after(self, task: int) -> tuple[int, int, int]:
        return self._way_after[task], self._node_after[task], self._value_after[task]

    def _holds_up(self, before: int, task: int) -> bool:
        return self._starts[before] + self._times[before] == self._starts[task]

    def _longest_paths(self) -> list[float]:
        self._starts = [0.0] * len(self._tasks)
        waits_for = [len(self._before(task)) for task in range(len(self._tasks))]
        ready = [task for task, count in enumerate(waits_for) if not count]
        while ready:
            task = ready.pop()
            self._starts[task] = self._earliest(task)
            for after in self._after(task):
                if after != _NONE:
                    waits_for[after] -= 1
                    if not waits_for[after]:
                        ready.append(after)
        return self._starts
