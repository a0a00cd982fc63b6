"""Client of the trajectory manager's task queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc.aio
from seamflow.errors import ExhaustedError, NotFoundError, SeamflowError, UnavailableError, decode
from seamflow.retry import Backoff
from seamflow.stubs import async_stub
from seamflow.trajectory.v1.task_service_pb2 import SubmitTasksRequest, SubmitTasksResponse
from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceStub
from seamflow.trajectory.v1.trajectory_pb2 import Task

from services.chassis import metrics
from services.chassis.errors import DependencyUnavailable
from services.chassis.log import get_logger

_MAX_TASKS = 64
START_SECONDS = 60.0
"""How long manager and run may take to appear; later outages are retried."""


class TaskQueue:
    """Submits tasks in order, in batches as large as the queue's last reported free space.

    Args:
        channel: to the trajectory manager.
        run_id: training job.
        clock: monotonic seconds.
    """

    def __init__(
        self, channel: grpc.aio.Channel, *, run_id: str, clock: Callable[[], float]
    ) -> None:
        self._stub = async_stub(TaskServiceStub, channel)
        self._run_id = run_id
        self._clock = clock
        self._start_by: float | None = clock() + START_SECONDS
        self._num_free = 1
        self._submitted = metrics.counter("dataloader", "submitted_tasks_total", "New tasks.")
        self._known = metrics.counter(
            "dataloader", "known_tasks_total", "Tasks that the run already had."
        )

    @property
    def batch_size(self) -> int:
        """Number of tasks to send next; at least 1, which blocks until there is space."""
        return min(max(self._num_free, 1), _MAX_TASKS)

    async def submit(self, tasks: Sequence[Task]) -> int:
        """Submit the first tasks of the sequence, when there is space; returns their number.

        Raises:
            SeamflowError: the trajectory manager rejects a task as invalid.
            DependencyUnavailable: the trajectory manager or the run did not appear in time.
        """
        backoff = Backoff()
        while True:
            sent = tasks[: self.batch_size]
            try:
                answer = await self._call(sent)
            except grpc.aio.AioRpcError as failure:
                error = decode(failure)
                self._raise_if_permanent(error, len(sent))
                self._num_free = 1  # another client may have filled the queue
                get_logger().debug("submit_waits", detail=str(error))
                if error.retry_after is None:
                    await backoff.wait()
                else:  # full; the manager gives a retry delay
                    await asyncio.sleep(error.retry_after)
            else:
                self._note(answer, len(sent))
                return len(sent)

    async def _call(self, tasks: Sequence[Task]) -> SubmitTasksResponse:
        return await self._stub.SubmitTasks(SubmitTasksRequest(run_id=self._run_id, tasks=tasks))

    def _raise_if_permanent(self, error: SeamflowError, num_sent: int) -> None:
        """Raise `error` unless a retry can succeed."""
        if isinstance(error, ExhaustedError):
            if error.retry_after is None and num_sent == 1:
                raise error  # a single task that is too large
        elif self._start_by is None:
            if not isinstance(error, UnavailableError):
                raise error
        elif not isinstance(error, UnavailableError | NotFoundError):
            raise error
        elif self._clock() > self._start_by:
            raise DependencyUnavailable("trajectory_manager", str(error)) from error

    def _note(self, answer: SubmitTasksResponse, num_sent: int) -> None:
        self._start_by = None
        self._num_free = answer.num_free
        self._submitted.inc(answer.num_accepted)
        self._known.inc(num_sent - answer.num_accepted)
