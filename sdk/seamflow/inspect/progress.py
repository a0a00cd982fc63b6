"""What the rules of learning look at, and where it is read from: the files of the run's folder."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from seamflow.durations import seconds_of
from seamflow.inspect.lives import Life, Restart, lives, stops
from seamflow.inspect.run_files import GrowingSteps, json_lines, read_steps
from seamflow.pages import pages
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb
from seamflow.trajectory.v1 import task_service_pb2 as task_pb

if TYPE_CHECKING:
    from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceAsyncStub

WINDOW = 3
"""Steps in a row of which a rule speaks, so that one odd step is no finding."""

_SECONDS = 5.0
_TIMED_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is.

    Example: Progress(steps=[{"step": 1, "reward_mean": 0.0, "reward_std": 0.0}])
    """

    steps: Sequence[Mapping[str, Any]]
    """Lines of metrics.jsonl, oldest first."""
    evaluations: Sequence[Mapping[str, Any]] = ()
    """Lines of evaluation.jsonl with a result, oldest first."""
    groups_per_step: int = 0
    """Groups in a step; 0: unknown."""
    num_equal_discarded: int = 0
    """Groups that left since the newest step as all their rewards were equal."""
    num_failed: int = 0
    num_tried: int = 0
    """Rollouts that were begun, these among them."""
    restarts: Sequence[Restart] = ()
    """Of processes in the newest life of the run, oldest first."""

    def last(self, name: str, count: int = WINDOW) -> list[float]:
        """The metric in the last `count` steps; [] if there are fewer or one of them lacks it."""
        found = self.all(name, self.steps[-count:])
        return found if len(found) == count else []

    def all(self, name: str, steps: Sequence[Mapping[str, Any]] | None = None) -> list[float]:
        """The finite values of a metric, by default of every step."""
        given = self.steps if steps is None else steps
        values = (step.get(name) for step in given)
        return [float(each) for each in values if each is not None and math.isfinite(each)]


def seconds_left(
    steps: Sequence[Mapping[str, Any]], num_steps: int, lives: Sequence[Life] = ()
) -> float | None:
    """Until the last of `num_steps`, by the median time of the newest steps; None: two are needed.

    Steps between which the run was stopped do not count.
    """
    newest = [step for step in steps[-_TIMED_STEPS - 1 :] if "time" in step]
    cut = [begin for begin, _ in stops(lives)]
    times = [
        after["time"] - before["time"]
        for before, after in pairwise(newest)
        if not any(before["time"] <= begin < after["time"] for begin in cut)
    ]
    return median(times) * (num_steps - newest[-1]["step"]) if times else None


def read_progress(folder: Path, steps: GrowingSteps | None = None) -> Progress:
    """Of the run in `folder`, without the counts of its services; files may be missing.

    `steps`: of this run, so that only new ones are read.
    """
    evaluations = json_lines(folder / "evaluation.jsonl")
    newest = lives(folder)[-1:]
    return Progress(
        restarts=newest[0].restarts if newest else (),
        steps=steps.read() if steps is not None else read_steps(folder / "metrics.jsonl"),
        evaluations=[line for line in evaluations if line.get("mean") is not None],
    )


def with_counts(
    progress: Progress, ready: sample_pb.Readiness | None, num_equal_discarded: int = 0
) -> Progress:
    """The progress with what the trajectory manager counts; None: it does not answer."""
    if ready is None:
        return progress
    size = max(progress.last("num_rollouts", 1) or [1.0]) / max(
        progress.last("num_groups", 1) or [1]
    )
    begun = round(ready.num_admitted_groups * size)
    return dataclasses.replace(
        progress,
        groups_per_step=ready.groups_per_step,
        num_equal_discarded=num_equal_discarded,
        num_failed=ready.num_replaced_samples,
        num_tried=begun + ready.num_replaced_samples,
    )


async def equal_groups_discarded(
    stub: TaskServiceAsyncStub, run_id: str, progress: Progress, ready: sample_pb.Readiness | None
) -> int:
    """Groups that were discarded after the newest step as all their rewards were equal.

    0 without a call while too few were discarded to matter.

    Raises:
        grpc.aio.AioRpcError: the trajectory manager rejects the request, or does not answer.
    """
    if ready is None or ready.num_discarded_groups < WINDOW * ready.groups_per_step:
        return 0
    since = max(progress.last("time", 1), default=0.0)
    request = task_pb.ListDeadLettersRequest(run_id=run_id, page_size=1000)
    listed = pages(lambda page: stub.ListDeadLetters(page, timeout=_SECONDS), request)
    return sum(
        [
            letter.reason == task_pb.DEAD_LETTER_REASON_ZERO_VARIANCE
            and seconds_of(letter.discard_time) > since
            async for page in listed
            for letter in page.dead_letters
        ]
    )
