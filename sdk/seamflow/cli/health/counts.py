"""Counts of the services that the rules of learning look at, beside the run's files."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from seamflow.cli.health.progress import WINDOW, Progress
from seamflow.durations import seconds_of
from seamflow.pages import pages
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb
from seamflow.trajectory.v1 import task_service_pb2 as task_pb

if TYPE_CHECKING:
    from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceAsyncStub

_SECONDS = 5.0


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
