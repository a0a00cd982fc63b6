"""What is scheduled: the pipelines of several models on the same nodes, and bounds on their time.

Each model is cut into stages, each on a node. A micro-batch goes forward through all stages, then
backward through them in reverse. A node does one task at a time, without preemption; on each node
the forward tasks of a model go in the order of its micro-batches, and so do its backward tasks. So
a schedule is the order of (model, kind) on each node. An actor and a critic in opposite directions
over the same nodes fill each other's idle times (RLHFuse, arXiv 2409.13221, intra-stage fusion).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FORWARD, BACKWARD = 0, 1
"""The kinds of tasks."""

Orders = Sequence[Sequence[tuple[int, int]]]
"""A schedule: of each node its tasks in order, as (model, kind)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One model, cut into stages.

    Raises:
        ValueError: a field that cannot be, by name.
    """

    nodes: tuple[int, ...]
    """The node of each stage."""
    num_micro_batches: int
    forward: tuple[float, ...]
    """Time of a micro-batch's forward task on each stage, in any unit."""
    backward: tuple[float, ...]
    """The same of its backward task."""
    activation_bytes: float = 1.0
    """What a micro-batch holds on a node from the start of forward to the end of backward."""

    def __post_init__(self) -> None:
        if not self.nodes or len(set(self.nodes)) < len(self.nodes):
            raise ValueError(f"nodes is {self.nodes}: give each stage a node of its own")
        for field in ("forward", "backward"):
            times = getattr(self, field)
            if len(times) != self.num_stages or min(times) <= 0:
                raise ValueError(f"{field} is {times}: give {self.num_stages} times above 0")
        if self.num_micro_batches < 1:
            raise ValueError(f"num_micro_batches is {self.num_micro_batches}: give at least 1")
        if not 0 <= self.activation_bytes < math.inf:
            raise ValueError(f"activation_bytes is {self.activation_bytes}: give at least 0")

    @property
    def num_stages(self) -> int:
        return len(self.nodes)

    @property
    def seconds_alone(self) -> float:
        """The time that it takes at least, and with 1F1B takes if all stages are alike."""
        return max(self._least(stage, self._work(stage)) for stage in range(self.num_stages))

    def arrival(self, stage: int) -> float:
        """When the first micro-batch can reach a stage."""
        return sum(self.forward[:stage])

    def departure(self, stage: int) -> float:
        """What is left to do after the last backward task of a stage."""
        return sum(self.backward[:stage])

    def _work(self, stage: int) -> float:
        return self.num_micro_batches * (self.forward[stage] + self.backward[stage])

    def _least(self, stage: int, work: float) -> float:
        return self.arrival(stage) + work + self.departure(stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Pipelines on the same nodes.

    Raises:
        ValueError: the capacity does not hold one micro-batch of each pipeline of a node.
    """

    pipelines: tuple[Pipeline, ...]
    """The first is the one that others give way to in the greedy schedule."""
    capacity: float = math.inf
    """Bytes of activations that a node holds."""
    values: bool = False
    """The first model's loss of a micro-batch needs another's output for it: its last stage's
    backward waits for their last stage's forward. The others have its micro-batches in turn."""

    def __post_init__(self) -> None:
        needed = self.pipelines[0].num_micro_batches
        given = sum(each.num_micro_batches for each in self.pipelines[1:])
        if self.values and given != needed:
            raise ValueError(
                f"the others have {given} micro-batches: give the first one's {needed}"
            )
        least = max(sum(each.activation_bytes for each, _ in self.on(v)) for v in self.nodes)
        if self.capacity < least:
            raise ValueError(
                f"capacity is {self.capacity:g}: a node needs {least:g} for one micro-batch of "
                "each of its models"
            )

    @property
    def nodes(self) -> range:
        return range(1 + max(node for each in self.pipelines for node in each.nodes))

    @property
    def num_tasks(self) -> int:
        """Forward and backward tasks of all stages."""
        return sum(2 * each.num_stages * each.num_micro_batches for each in self.pipelines)

    def value_of(self, micro_batch: int) -> tuple[int, int]:
        """The model, and its micro-batch, that a micro-batch of the first waits for."""
        turn, model = divmod(micro_batch, len(self.pipelines) - 1)
        return 1 + model, turn

    def on(self, node: int) -> list[tuple[Pipeline, int]]:
        """The pipelines with a stage on a node, each with that stage."""
        return [(each, each.nodes.index(node)) for each in self.pipelines if node in each.nodes]


def lower_bound(problem: Problem) -> float:
    """No schedule is shorter: each pipeline alone, and the work of each node between the first
    arrival and the shortest way out."""
    alone = max(each.seconds_alone for each in problem.pipelines)
    return max(alone, *(_least_of_node(problem, node) for node in problem.nodes))


def _least_of_node(problem: Problem, node: int) -> float:
    here = problem.on(node)
    if not here:
        return 0.0
    first = min(each.arrival(stage) for each, stage in here)
    last = min(each.departure(stage) for each, stage in here)
    times = (m.num_micro_batches * (m.forward[s] + m.backward[s]) for m, s in here)
    return first + sum(times) + last


def serial_seconds(problem: Problem) -> float:
    """One model after the other, replicas side by side: RLHFuse's baseline, without any overlap
    where one model ends and the next begins."""
    first, *others = problem.pipelines
    return first.seconds_alone + max((each.seconds_alone for each in others), default=0.0)


class DeadlockError(ValueError):
    """A schedule in which tasks wait for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task, placed in time."""

    node: int
    pipeline: int
    kind: int
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A schedule in time."""

    tasks: tuple[Task, ...]
    """By node, in order."""
    seconds: float
    """When the last task ends."""
    peak_bytes: float
    """The most activation bytes on any node."""


def timeline(problem: Problem, orders: Orders) -> Timeline:
    """Start each task as soon as its node is free and what it needs is there.

    Raises:
        DeadlockError: the orders leave out tasks, or tasks wait for each other.
    """
    done: dict[tuple[int, int, int, int], float] = {}
    placed: list[list[Task]] = [[] for _ in problem.nodes]
    moved = True
    while moved:
        moved = False
        for node in problem.nodes:
            while (task := _next(problem, orders, placed[node], node, done)) is not None:
                stage = problem.pipelines[task.pipeline].nodes.index(node)
                done[task.pipeline, task.kind, task.micro_batch, stage] = task.end
                placed[node].append(task)
                moved = True
    tasks = tuple(task for each in placed for task in each)
    if len(tasks) < problem.num_tasks:
        raise DeadlockError(f"only {len(tasks)} of {problem.num_tasks} tasks can start")
    return Timeline(
        tasks=tasks,
        seconds=max(task.end for task in tasks),
        peak_bytes=max(_peak(problem, each) for each in placed),
    )


def _next(
    problem: Problem,
    orders: Orders,
    before: list[Task],
    node: int,
    done: dict[tuple[int, int, int, int], float],
) -> Task | None:
    """The next task of a node; None if it has none, or waits for another node."""
    if len(before) == len(orders[node]):
        return None
    index, kind = orders[node][len(before)]
    each = problem.pipelines[index]
    stage = each.nodes.index(node)
    number = sum(1 for task in before if (task.pipeline, task.kind) == (index, kind))
    ready = _ready(problem, index, kind, number, stage, done)
    if ready is None:
        return None
    start = max(ready, before[-1].end if before else 0.0)
    times = each.forward if kind == FORWARD else each.backward
    return Task(
        node=node,
        pipeline=index,
        kind=kind,
        micro_batch=number,
        start=start,
        end=start + times[stage],
    )


def _ready(
    problem: Problem,
    index: int,
    kind: int,
    number: int,
    stage: int,
    done: dict[tuple[int, int, int, int], float],
) -> float | None:
    """When the input of a task is there; None: not yet known."""
    if kind == FORWARD:
        return 0.0 if stage == 0 else done.get((index, FORWARD, number, stage - 1))
    if stage == problem.pipelines[index].num_stages - 1:
        passed = done.get((index, FORWARD, number, stage))
        valued = _valued(problem, number, done) if index == 0 and problem.values else 0.0
        return None if passed is None or valued is None else max(passed, valued)
    return done.get((index, kind, number, stage + 1))


def _valued(
    problem: Problem, number: int, done: dict[tuple[int, int, int, int], float]
) -> float | None:
    """When the value of a micro-batch of the first model is there; None: not yet known."""
    index, turn = problem.value_of(number)
    return done.get((index, FORWARD, turn, problem.pipelines[index].num_stages - 1))


def _peak(problem: Problem, tasks: list[Task]) -> float:
    held = most = 0.0
    for task in tasks:
        size = problem.pipelines[task.pipeline].activation_bytes
        held += size if task.kind == FORWARD else -size
        most = max(most, held)
    return most
