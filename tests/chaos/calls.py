"""Calls to the trajectory manager as a careful client makes them: repeated until answered."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import grpc
import grpc.aio
from seamflow.common.v1 import tokens_pb2
from seamflow.durations import to_duration
from seamflow.errors import DeadlineError, ExhaustedError, SeamflowError, UnavailableError, decode
from seamflow.trajectory.v1 import (
    run_service_pb2,
    task_service_pb2,
    trajectory_pb2,
    trajectory_service_pb2,
)
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub
from seamflow.trajectory.v1.sample_service_pb2_grpc import SampleServiceStub
from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceStub
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from tests.chaos.store.history import logprob_of

CREDENTIAL = hashlib.sha256(b"chaos").hexdigest()
CALL_SECONDS = 5.0
GIVE_UP_SECONDS = 120.0
_PAUSE_SECONDS = 0.05
_AGAIN = (UnavailableError, DeadlineError, ExhaustedError)
_PAGE = 100


async def call_retrying_async(
    call: Callable[..., Any], request: Any, timeout: float = CALL_SECONDS
) -> tuple[Any, float]:
    """The answer, and the monotonic time at which the call that got it was sent.

    Raises:
        SeamflowError: refused, or not answered within two minutes.
    """
    limit = time.monotonic() + GIVE_UP_SECONDS
    while True:
        sent = time.monotonic()
        try:
            return await call(request, timeout=timeout), sent
        except grpc.aio.AioRpcError as failure:
            error = decode(failure)
            if not isinstance(error, _AGAIN) or sent > limit:
                raise error from failure
        await asyncio.sleep(_PAUSE_SECONDS)


def call_retrying(call: Callable[..., Any], request: Any, timeout: float = CALL_SECONDS) -> Any:
    """The answer of a blocking call.

    Raises:
        SeamflowError: refused, or not answered within two minutes.
    """
    limit = time.monotonic() + GIVE_UP_SECONDS
    while True:
        try:
            return call(request, timeout=timeout)
        except grpc.RpcError as failure:
            # A blocking call raises an RpcError that is also its Call: all that `decode` reads.
            error = decode(cast(grpc.aio.AioRpcError, failure))
            if not isinstance(error, _AGAIN) or time.monotonic() > limit:
                raise error from failure
        time.sleep(_PAUSE_SECONDS)


def tokens_of(ids: Sequence[int], origin: tokens_pb2.Origin.ValueType) -> tokens_pb2.Tokens:
    """`ids` as one span of weight version 0, each with the log-prob that the checker expects."""
    sampled = origin == tokens_pb2.ORIGIN_POLICY
    source = tokens_pb2.VERSION_SOURCE_ENGINE if sampled else tokens_pb2.VERSION_SOURCE_UNSPECIFIED
    span = tokens_pb2.Span(
        start=0,
        num_tokens=len(ids),
        origin=origin,
        version_source=source,
        server_id="chaos" if sampled else "",
    )
    return tokens_pb2.Tokens(token_ids=ids, logprobs=map(logprob_of, ids), spans=[span])


class Caller:
    """Blocking calls of the scenarios themselves, at the manager behind `target`."""

    def __init__(self, channel: grpc.Channel, run_id: str) -> None:
        """`channel` stays the caller's to close."""
        self.run_id = run_id
        self.runs = RunServiceStub(channel)
        self.trajectories = TrajectoryServiceStub(channel)
        self.tasks = TaskServiceStub(channel)
        self.samples = SampleServiceStub(channel)

    @classmethod
    @contextmanager
    def at(cls, target: str, run_id: str) -> Iterator[Caller]:
        """Calls to `target` for as long as the context lives."""
        with grpc.insecure_channel(target, options=_OPTIONS) as channel:
            yield cls(channel, run_id)

    def create_run(self, config: trajectory_pb2.RunConfig) -> None:
        """Create the run."""
        request = run_service_pb2.CreateRunRequest(run_id=self.run_id, config=config)
        call_retrying(self.runs.CreateRun, request)

    def lease(self, wait_seconds: float = 0.0) -> task_service_pb2.TaskLease | None:
        """Lease one task; None: there was none for `wait_seconds`."""
        request = task_service_pb2.LeaseTasksRequest(
            run_id=self.run_id, request_id=uuid.uuid4().hex, wait=to_duration(wait_seconds)
        )
        leases = call_retrying(self.tasks.LeaseTasks, request, wait_seconds + 5).leases
        return leases[0] if leases else None

    def submit(self, *task_ids: str) -> None:
        """Queue TRAIN tasks."""
        tasks = [
            trajectory_pb2.Task(task_id=name, purpose=tokens_pb2.PURPOSE_TRAIN) for name in task_ids
        ]
        request = task_service_pb2.SubmitTasksRequest(run_id=self.run_id, tasks=tasks)
        call_retrying(self.tasks.SubmitTasks, request)

    def trajectories_stored(self) -> Iterator[trajectory_pb2.Trajectory]:
        """Everything the store holds of the run."""
        token = ""
        while True:
            request = trajectory_service_pb2.ListTrajectoriesRequest(
                run_id=self.run_id, page_size=_PAGE, page_token=token
            )
            page = call_retrying(self.trajectories.ListTrajectories, request, 60.0)
            yield from page.trajectories
            token = page.next_page_token
            if not token:
                return

    def refusal(self, call: Callable[..., Any], request: Any) -> str:
        """Why the call is refused; empty: it was accepted."""
        try:
            call_retrying(call, request)
        except SeamflowError as error:
            return error.reason
        return ""


_OPTIONS = [
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]
