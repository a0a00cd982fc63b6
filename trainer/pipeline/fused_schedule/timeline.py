"""When each task of a schedule starts, how long all take, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.pipeline.fused_schedule.problem import FORWARD, Orders, Problem


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
