"""Small real services, served on a free port of this process, for the SDK to talk to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_service_pb2 as rollout_pb
from seamflow.rollout.v1.rollout_service_pb2_grpc import (
    RolloutServiceServicer,
    add_RolloutServiceServicer_to_server,
)
from seamflow.trajectory.v1 import task_service_pb2 as task_pb
from seamflow.trajectory.v1.task_service_pb2_grpc import (
    TaskServiceServicer,
    add_TaskServiceServicer_to_server,
)

TOKENS = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
"""The policy's answer in these tests."""

Added = tuple[Callable[[Any, grpc.aio.Server], None], Any]


@asynccontextmanager
async def serving(*services: Added, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """Address of a server with these services."""
    server = grpc.aio.server()
    for add, servicer in services:
        add(servicer, server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def tokens(first: int, end: int, version: int) -> tokens_pb2.Tokens:
    """TOKENS[first:end] as sampled under one weight version."""
    span = tokens_pb2.Span(
        start=0,
        num_tokens=end - first,
        origin=tokens_pb2.ORIGIN_POLICY,
        weight_version=version,
        server_id=f"server-{version}",
    )
    ids = TOKENS[first:end]
    return tokens_pb2.Tokens(
        token_ids=ids, logprobs=[-0.5 * i for i in ids], spans=[span] if ids else []
    )


class Gateway(RolloutServiceServicer):
    """Answers TOKENS; each stream breaks at the next of `breaks`, counted in tokens."""

    def __init__(self, breaks: Sequence[int] = (), code: Any = grpc.StatusCode.UNAVAILABLE) -> None:
        self._breaks = list(breaks)
        self._code = code
        self.offsets: list[int] = []
        """resume_from_offset of every call of Generate."""
        self.chunk_seconds: list[float] = []
        """How often each call of Generate asks for tokens."""
        self.started: list[rollout_pb.StartRolloutRequest] = []
        """Rollouts opened."""
        self.opened = asyncio.Event()
        """Set with the first of them."""
        self.finished: list[rollout_pb.FinishRolloutRequest] = []
        """Rollouts closed."""
        self.closed: asyncio.Queue[str] = asyncio.Queue()
        """Their names."""
        self.drift: rollout_pb.Drift | None = None
        """What each turn ends with."""

    async def StartRollout(self, request: Any, context: Any) -> Any:
        """Open a rollout."""
        self.started.append(request)
        self.opened.set()
        return rollout_pb.StartRolloutResponse(credential=f"credential of {request.rollout_id}")

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Two tokens a chunk; the weight version is the number of the call."""
        self.offsets.append(request.resume_from_offset)
        self.chunk_seconds.append(request.chunk_interval.ToTimedelta().total_seconds())
        end = self._breaks.pop(0) if self._breaks else len(TOKENS)
        yield rollout_pb.GenerateResponse(heartbeat=rollout_pb.Heartbeat())
        for first in range(request.resume_from_offset, end, 2):
            new = tokens(first, min(first + 2, end), len(self.offsets))
            chunk = rollout_pb.TokenChunk(offset=first, tokens=new)
            yield rollout_pb.GenerateResponse(chunk=chunk)
        if end < len(TOKENS):
            await context.abort(self._code, "the stream breaks")
        finish = rollout_pb.TurnEnd(
            finish_reason=tokens_pb2.FINISH_REASON_STOP,
            text="hello",
            num_prompt_tokens=3,
            num_sampled_tokens=len(TOKENS),
            drift=self.drift,
        )
        yield rollout_pb.GenerateResponse(end=finish)

    async def FinishRollout(self, request: Any, context: Any) -> Any:
        """Close a rollout."""
        self.finished.append(request)
        self.closed.put_nowait(request.rollout_id)
        return rollout_pb.FinishRolloutResponse()

    def added(self) -> Added:
        """For `serving`."""
        return add_RolloutServiceServicer_to_server, self


class Tasks(TaskServiceServicer):
    """Leases its tasks one after the other; then there is nothing to do."""

    def __init__(self, *payloads: str, lease_seconds: float = 60.0, most: int = 8) -> None:
        self._payloads = list(payloads)
        self._most = most  # leases of a call
        self.asked: list[int] = []
        """`max_leases` of each call of LeaseTask that was given some."""
        self._lease = Duration(nanos=int(lease_seconds * 1e9) % 10**9, seconds=int(lease_seconds))
        self._num_leased = 0
        self.completed: asyncio.Queue[str] = asyncio.Queue()
        """Lease tokens, as they are completed."""
        self.extended: asyncio.Queue[list[str]] = asyncio.Queue()
        """Lease tokens of each call of ExtendTasks."""
        self.lost: set[str] = set()
        """Leases to report as lost."""
        self.most_asking = 0
        """Calls of LeaseTask that waited at the same time, at most."""
        self._num_asking = 0

    async def LeaseTask(self, request: Any, context: Any) -> Any:
        """The next task, or nothing after a short wait."""
        if not self._payloads:
            self._num_asking += 1
            self.most_asking = max(self.most_asking, self._num_asking)
            await asyncio.sleep(0.05)
            self._num_asking -= 1
            return task_pb.LeaseTaskResponse()
        self.asked.append(request.max_leases)
        number = min(len(self._payloads), self._most, max(request.max_leases, 1))
        first, *more = [self._next() for _ in range(number)]
        return task_pb.LeaseTaskResponse(
            task=first.task,
            rollout_id=first.rollout_id,
            lease_token=first.lease_token,
            lease_duration=self._lease,
            more=more,
        )

    def _next(self) -> Any:
        number, self._num_leased = self._num_leased, self._num_leased + 1
        return task_pb.TaskLease(
            task=task_pb.Task(
                task_id=f"task-{number}",
                payload_json=self._payloads.pop(0),
                purpose=tokens_pb2.PURPOSE_TRAIN,
            ),
            rollout_id=f"rollout-{number}",
            lease_token=f"lease-{number}",
        )

    async def ExtendTasks(self, request: Any, context: Any) -> Any:
        """Returns the lost leases."""
        await self.extended.put(list(request.lease_tokens))
        lost = [token for token in request.lease_tokens if token in self.lost]
        return task_pb.ExtendTasksResponse(lost_lease_tokens=lost)

    async def CompleteTask(self, request: Any, context: Any) -> Any:
        """The agent is done."""
        await self.completed.put(request.lease_token)
        return task_pb.CompleteTaskResponse()

    def added(self) -> Added:
        """For `serving`."""
        return add_TaskServiceServicer_to_server, self
