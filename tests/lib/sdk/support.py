"""Small real services, served on a free port of this process, for the SDK to talk to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from seamflow.common.v1 import tokens_pb2
from seamflow.durations import to_duration
from seamflow.rollout.v1 import rollout_service_pb2 as rollout_pb
from seamflow.rollout.v1.rollout_service_pb2_grpc import (
    RolloutServiceServicer,
    add_RolloutServiceServicer_to_server,
)
from seamflow.trajectory.v1 import trajectory_pb2

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
    """Answers TOKENS; each stream breaks at the next of `breaks`, counted in tokens.

    Leases its tasks, of these payloads, one after the other; then there is nothing to do.
    """

    def __init__(
        self,
        breaks: Sequence[int] = (),
        code: Any = grpc.StatusCode.UNAVAILABLE,
        *,
        payloads: Sequence[str] = (),
        lease_seconds: float = 60.0,
        most: int = 8,
    ) -> None:
        self._breaks = list(breaks)
        self._code = code
        self._payloads = list(payloads)
        self.lease_failures: list[grpc.StatusCode] = []
        """How the next requests for leases fail."""
        self._most = most  # leases of a call
        self._lease = to_duration(lease_seconds)
        self._num_leased = self._num_asking = 0
        self.offsets: list[int] = []
        """resume_from_offset of every call of Generate."""
        self.generated: list[rollout_pb.GenerateRequest] = []
        """Every call of Generate."""
        self.credentials: list[str] = []
        """What each call of Generate and FinishRollout shows."""
        self.started: list[rollout_pb.StartRolloutRequest] = []
        """Rollouts opened without a leased task."""
        self.opened = asyncio.Event()
        """Set with the first rollout."""
        self.finished: list[rollout_pb.FinishRolloutRequest] = []
        """Rollouts closed."""
        self.closed: asyncio.Queue[str] = asyncio.Queue()
        """Their names."""
        self.asked: list[rollout_pb.LeaseRolloutsRequest] = []
        """Calls of LeaseRollouts that were given some."""
        self.evaluation: list[str] = []
        """Payloads of tasks for calls that ask for evaluation alone."""
        self.most_asking = 0
        """Calls of LeaseRollouts that waited at the same time, at most."""
        self.extended: asyncio.Queue[list[str]] = asyncio.Queue()
        """Rollouts of each call of ExtendRollouts."""
        self.lost: set[str] = set()
        """Rollouts whose lease to report as lost."""
        self.ended = False
        """Whether the run has ended."""
        self.drift: tokens_pb2.Drift | None = None
        """What each turn ends with."""
        self.answer = rollout_pb.Message(
            role="assistant", content=[rollout_pb.ContentPart(type="text", text="hello")]
        )
        """The policy's answer, parsed."""

    async def LeaseRollouts(self, request: Any, context: Any) -> Any:
        """The next tasks, or nothing after a short wait."""
        if self.ended:
            reason = trajectory_pb2.EMPTY_REASON_RUN_ENDED
            return rollout_pb.LeaseRolloutsResponse(empty_reason=reason)
        if self.lease_failures:
            await context.abort(self.lease_failures.pop(0), "no")
        if request.purpose == tokens_pb2.PURPOSE_EVAL:
            return await self._evaluation()
        if not self._payloads:
            self._num_asking += 1
            self.most_asking = max(self.most_asking, self._num_asking)
            await asyncio.sleep(0.05)
            self._num_asking -= 1
            reason = trajectory_pb2.EMPTY_REASON_NOTHING_QUEUED
            return rollout_pb.LeaseRolloutsResponse(empty_reason=reason)
        self.asked.append(request)
        self.opened.set()
        number = min(len(self._payloads), self._most, max(request.max_rollouts, 1))
        return rollout_pb.LeaseRolloutsResponse(leases=[self._next() for _ in range(number)])

    async def _evaluation(self) -> rollout_pb.LeaseRolloutsResponse:
        """The next task of `evaluation`, or nothing after a short wait."""
        if self.evaluation:
            self._payloads.insert(0, self.evaluation.pop(0))
            return rollout_pb.LeaseRolloutsResponse(leases=[self._next()])
        await asyncio.sleep(0.05)
        reason = trajectory_pb2.EMPTY_REASON_NOTHING_QUEUED
        return rollout_pb.LeaseRolloutsResponse(empty_reason=reason)

    def _next(self) -> rollout_pb.RolloutLease:
        number, self._num_leased = self._num_leased, self._num_leased + 1
        return rollout_pb.RolloutLease(
            task=trajectory_pb2.Task(
                task_id=f"task-{number}",
                payload_json=self._payloads.pop(0),
                purpose=tokens_pb2.PURPOSE_TRAIN,
            ),
            rollout_id=f"rollout-{number}",
            credential=f"credential of rollout-{number}",
            lease_duration=self._lease,
        )

    async def ExtendRollouts(self, request: Any, context: Any) -> Any:
        """Returns the lost leases."""
        names = [each.rollout_id for each in request.rollouts]
        assert all(
            each.credential == f"credential of {each.rollout_id}" for each in request.rollouts
        )
        await self.extended.put(names)
        lost = [name for name in names if name in self.lost]
        return rollout_pb.ExtendRolloutsResponse(lost_rollout_ids=lost, lease_duration=self._lease)

    async def StartRollout(self, request: Any, context: Any) -> Any:
        """Open a rollout; a member of a group gets another name, and a lease."""
        self.started.append(request)
        self.opened.set()
        name = request.rollout_id
        if request.HasField("group"):
            name = f"{request.group.group_id}/0/1"
        answer = rollout_pb.StartRolloutResponse(
            rollout_id=name, credential=f"credential of {name}"
        )
        if request.HasField("group"):
            answer.lease_duration.CopyFrom(self._lease)
        return answer

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Two tokens a chunk; the weight version is the number of the call."""
        self.offsets.append(request.resume_from_offset)
        self.generated.append(request)
        self.credentials.append(shown(context))
        end = self._breaks.pop(0) if self._breaks else len(TOKENS)
        yield rollout_pb.GenerateResponse(heartbeat=rollout_pb.Heartbeat())
        for first in range(request.resume_from_offset, end, 2):
            new = tokens(first, min(first + 2, end), len(self.offsets))
            chunk = rollout_pb.TokenChunk(offset=first, tokens=new, text=".." * request.stream_text)
            yield rollout_pb.GenerateResponse(chunk=chunk)
        if end < len(TOKENS):
            await context.abort(self._code, "the stream breaks")
        finish = rollout_pb.TurnEnd(
            finish_reason=tokens_pb2.FINISH_REASON_STOP,
            message=self.answer,
            raw_text="hello<end>",
            num_prompt_tokens=3,
            num_sampled_tokens=len(TOKENS),
            prefix_turn_id="before",
            prefix_length=2,
            stop="<end>",
            drift=self.drift,
        )
        yield rollout_pb.GenerateResponse(end=finish)

    async def FinishRollout(self, request: Any, context: Any) -> Any:
        """Close a rollout."""
        self.credentials.append(shown(context))
        self.finished.append(request)
        self.closed.put_nowait(request.rollout_id)
        return rollout_pb.FinishRolloutResponse()

    async def GetModel(self, request: Any, context: Any) -> Any:
        """A small model."""
        return rollout_pb.GetModelResponse(name="tiny", vocabulary_size=17, max_context=64)

    async def GetRun(self, request: Any, context: Any) -> Any:
        """It runs."""
        run = trajectory_pb2.Run(run_id=request.run_id, state=trajectory_pb2.RUN_STATE_RUNNING)
        return rollout_pb.GetRunResponse(run=run)

    async def Tokenize(self, request: Any, context: Any) -> Any:
        """One id for each character of the text, or message."""
        number = len(request.text) if request.HasField("text") else len(request.messages.messages)
        return rollout_pb.TokenizeResponse(token_ids=range(number))

    def added(self) -> Added:
        """For `serving`."""
        return add_RolloutServiceServicer_to_server, self


def shown(context: Any) -> str:
    """The bearer token of a call, the only one."""
    (value,) = [v for k, v in context.invocation_metadata() if k == "authorization"]
    return str(value.removeprefix("Bearer "))
