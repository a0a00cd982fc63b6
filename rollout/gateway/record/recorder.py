"""Batched recording: tokens, ends of turns and ends of rollouts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from seamflow.errors import SeamflowError, decode, from_status
from seamflow.retry import Backoff, may_retry
from seamflow.rollout.v1 import rollout_service_pb2 as rollout_pb
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from rollout.gateway.credentials import digest
from services.chassis import metrics
from services.chassis.errors import ServiceError
from services.chassis.rpc import tracing
from services.chassis.rpc.clients import call_until_answered
from services.chassis.rpc.status import from_dependency

if TYPE_CHECKING:
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

    from rollout.gateway.prompt.prompt import Prompt

MAX_MESSAGE_BYTES = 1 << 20
"""Limit of a message; a larger part is sent alone."""
MAX_PARTS = 1024
"""The store's limit of parts in one message."""
MAX_IN_FLIGHT = 2
"""Messages in flight: the next is packed while the store works on one."""
MAX_WAITING_BYTES = 64 << 20
"""Beyond this, callers block, and with them the streams that their tokens come from."""

Send = Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]
"""Sends parts as one message; returns each part's answer or `SeamflowError`. Raises `ServiceError`
if the whole message fails."""


@dataclass(slots=True)
class _Pending:
    part: Message
    num_bytes: int
    answer: asyncio.Future[Any]
    traceparent: str | None


class RequestBatcher:
    """Group commit: parts of many callers are sent as a few messages.

    A limited number of messages is in flight; parts that arrive in the meantime form the next one.
    So messages grow with the load, and a single turn is sent without delay. Run `keep_sending` in
    the background.
    """

    def __init__(
        self,
        send: Send,
        *,
        max_in_flight: int = MAX_IN_FLIGHT,
        max_parts: int = MAX_PARTS,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self._send_parts = send
        self._max_in_flight = self._num_idle = max_in_flight
        self._max_parts = max_parts
        self._max_message_bytes = max_message_bytes
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: deque[_Pending] = deque()
        self._num_bytes = 0  # pending or in flight
        self._arrived = asyncio.Event()
        self._has_capacity = asyncio.Event()

    async def send(self, part: Message) -> Any:
        """Send `part` and return its answer; retries while the store is unavailable or pushes back.

        Parts are sent in the order of the calls.

        Raises:
            ServiceError: the store refused this part.
        """
        backoff: Backoff | None = None
        while True:
            while self._num_bytes >= self._max_waiting_bytes:
                self._has_capacity.clear()
                await self._has_capacity.wait()
            answer = await self._queued(part)
            if isinstance(answer, ServiceError):
                raise answer
            if not isinstance(answer, SeamflowError):
                return answer
            if not may_retry(answer):
                raise from_dependency(answer)
            backoff = backoff or Backoff()
            await backoff.wait(answer.retry_after)

    async def keep_sending(self) -> None:
        """Send pending parts; runs until cancelled."""
        async with asyncio.TaskGroup() as senders:
            for _ in range(self._max_in_flight):
                senders.create_task(self._send_messages())

    async def _send_messages(self) -> None:
        while True:
            await self._arrived.wait()
            message = self._next_message()
            self._num_idle -= 1
            await self._send(message)
            self._num_idle += 1

    def _queued(self, part: Message) -> asyncio.Future[Any]:
        answer = asyncio.get_running_loop().create_future()
        waiting = _Pending(part, part.ByteSize(), answer, tracing.traceparent())
        self._waiting.append(waiting)
        self._num_bytes += waiting.num_bytes
        self._arrived.set()
        return waiting.answer

    def _next_message(self) -> list[_Pending]:
        message: list[_Pending] = []
        capacity = self._max_message_bytes
        # Callers answered together return together: divide their parts between all idle senders.
        share = min(self._max_parts, -(-len(self._waiting) // self._num_idle))
        while self._waiting and len(message) < share:
            if message and self._waiting[0].num_bytes > capacity:
                break
            waiting = self._waiting.popleft()
            if waiting.answer.cancelled():  # its agent has gone
                self._leave([waiting])
                continue
            message.append(waiting)
            capacity -= waiting.num_bytes
        if not self._waiting:
            self._arrived.clear()
        return message

    async def _send(self, message: list[_Pending]) -> None:
        if not message:
            return
        answers: Sequence[Any]
        try:
            with _span(message):
                answers = await self._send_parts([waiting.part for waiting in message])
        except ServiceError as error:
            answers = [error] * len(message)
        for waiting, answer in zip(message, answers, strict=True):
            if not waiting.answer.cancelled():
                waiting.answer.set_result(answer)
        self._leave(message)

    def _leave(self, message: list[_Pending]) -> None:
        self._num_bytes -= sum(waiting.num_bytes for waiting in message)
        if self._num_bytes < self._max_waiting_bytes:
            self._has_capacity.set()


def _span(message: list[_Pending]) -> AbstractContextManager[None]:
    """A span of the first part's trace, linked to those of the others."""
    causes = dict.fromkeys(part.traceparent for part in message if part.traceparent is not None)
    first, *others = causes or (None,)
    return tracing.span("send batch", parent=first, links=others, num_parts=len(message))


_MESSAGES = metrics.counter(
    "rollout_gateway", "record_messages_total", "Messages of appends sent to the store."
)
_APPENDS = metrics.counter(
    "rollout_gateway", "recorded_appends_total", "Appends that the store acknowledged."
)

_Part = pb.TokenAppend | pb.RolloutFinish
_Answer = pb.TokenAppendResult | pb.RolloutFinishResult | SeamflowError


class Recorder:
    """Records tokens and finishes rollouts; run `keep_sending` in the background."""

    def __init__(self, store: TrajectoryServiceAsyncStub, **bounds: int) -> None:
        """`bounds` are the limits of `RequestBatcher`."""
        self._store = store
        self._batcher = RequestBatcher(self._send, **bounds)
        self.keep_sending = self._batcher.keep_sending

    async def record(self, append: pb.TokenAppend) -> int:
        """Record tokens, retrying without a limit; returns the turn's recorded length.

        Await each append of a turn before the next one: a retried append must not find its
        successor stored.

        Raises:
            ServiceError: the store refused this append.
        """
        result: pb.TokenAppendResult = await self._batcher.send(append)
        return result.appended.num_tokens

    async def finish(self, finish: pb.RolloutFinish) -> None:
        """Finish a rollout after all its turns are recorded.

        Raises:
            ServiceError: the store refused it.
        """
        await self._batcher.send(finish)

    async def _send(self, parts: Sequence[_Part]) -> list[_Answer]:
        request = pb.AppendTokensRequest(
            appends=[part for part in parts if isinstance(part, pb.TokenAppend)],
            finishes=[part for part in parts if isinstance(part, pb.RolloutFinish)],
        )
        _MESSAGES.inc()
        # Every part is idempotent, so a failed message is repeated unchanged.
        response = await call_until_answered(lambda: self._store.AppendTokens(request))
        _APPENDS.inc(sum(not result.HasField("error") for result in response.results))
        appended, finished = iter(response.results), iter(response.finish_results)
        results: list[pb.TokenAppendResult | pb.RolloutFinishResult] = [
            next(appended) if isinstance(part, pb.TokenAppend) else next(finished) for part in parts
        ]
        return [from_status(r.error) if r.HasField("error") else r for r in results]


_MAX_PARTS = 64
_MAX_IN_FLIGHT = 4
"""A message is answered when its slowest part is, such as a prompt that continues a long rollout:
small messages and several in flight keep the others fast."""

_Opened = pb.NewRollout | pb.NewTurn


def begin_request(
    request: rollout_pb.GenerateRequest, credential: str, prompt: Prompt, attempt_id: str
) -> pb.NewTurn:
    """Opens the turn, or takes it over from another attempt under the next epoch."""
    begin = pb.NewTurn(
        run_id=request.run_id,
        rollout_id=request.rollout_id,
        turn_id=request.turn_id,
        attempt_id=attempt_id,
        parent_turn_id=request.parent_turn_id,
        template_fingerprint=prompt.fingerprint,
        sampling=request.sampling,
        credential_digest=digest(credential),
    )
    if prompt.message_keys:
        begin.message_keys.keys.extend(prompt.message_keys)
    else:
        begin.token_ids = prompt.packed_ids
    return begin


class TurnOpener:
    """Opens rollouts and turns; run `keep_sending` in the background.

    Separate from `Recorder`: tokens must not wait until long prompts are matched in the store.
    """

    def __init__(
        self, store: TrajectoryServiceAsyncStub, *, max_in_flight: int = _MAX_IN_FLIGHT
    ) -> None:
        self._store = store
        self._batcher = RequestBatcher(
            self._send, max_in_flight=max_in_flight, max_parts=_MAX_PARTS
        )
        self.keep_sending = self._batcher.keep_sending

    async def start(self, new: pb.NewRollout) -> pb.StartedRollout:
        """Open a rollout. Raises `ServiceError`: the store refused it."""
        result: pb.NewRolloutResult = await self._batcher.send(new)
        return result.started

    async def begin(self, new: pb.NewTurn) -> pb.BegunTurn:
        """Open a turn. Raises `ServiceError`: the store refused it."""
        result: pb.NewTurnResult = await self._batcher.send(new)
        return result.begun

    async def _send(self, parts: Sequence[_Opened]) -> Sequence[Any]:
        request = pb.BeginTurnsRequest(
            rollouts=[part for part in parts if isinstance(part, pb.NewRollout)],
            turns=[part for part in parts if isinstance(part, pb.NewTurn)],
        )
        try:
            response = await self._store.BeginTurns(request)
        except grpc.aio.AioRpcError as error:
            # Each part is retried separately, if its agent is still connected: one that has gone
            # may have begun the turn again elsewhere.
            return [decode(error)] * len(parts)
        rollouts, turns = iter(response.rollouts), iter(response.turns)
        results: list[pb.NewRolloutResult | pb.NewTurnResult] = [
            next(rollouts) if isinstance(part, pb.NewRollout) else next(turns) for part in parts
        ]
        return [from_status(r.error) if r.HasField("error") else r for r in results]
