"""Recording for many turns at once: what waits goes out as one message, each part for itself.

A few messages are under way at a time; whatever arrives meanwhile is in the next one. So messages
grow with the load, and a single turn waits for nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from seamflow.errors import ExhaustedError, UnavailableError, from_status
from seamflow.retry import Backoff
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from rollout.gateway.peers import answered, forwarded
from services.chassis import metrics
from services.chassis.errors import ServiceError

if TYPE_CHECKING:
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

__all__ = ["Recorder"]

MAX_MESSAGE_BYTES = 1 << 20
"""A message stops growing here; one append that is larger goes alone."""
MAX_PARTS = 1024
"""As many parts at most as the store takes."""
MAX_UNDER_WAY = 2
"""Messages at a time: while the store works on one, the next is packed."""
MAX_WAITING_BYTES = 64 << 20
"""Beyond this, callers wait, and with them the streams their tokens come from."""

_MESSAGES = metrics.counter(
    "rollout_gateway", "record_messages_total", "Messages of appends sent to the store."
)
_APPENDS = metrics.counter(
    "rollout_gateway", "recorded_appends_total", "Appends that the store acknowledged."
)


_Part = pb.Append | pb.FinishRolloutRequest
_Answer = pb.AppendResult | pb.FinishResult | ServiceError


@dataclass(slots=True)
class _Waiting:
    part: _Part
    num_bytes: int
    answer: asyncio.Future[_Answer]


class Recorder:
    """Stores tokens and closes rollouts; `keep_sending` runs as long as it is used."""

    def __init__(
        self,
        store: TrajectoryServiceAsyncStub,
        *,
        max_under_way: int = MAX_UNDER_WAY,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self._store = store
        self._max_under_way = self._num_idle = max_under_way
        self._max_message_bytes = max_message_bytes
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: deque[_Waiting] = deque()
        self._num_bytes = 0  # waiting or under way
        self._arrived = asyncio.Event()
        self._has_room = asyncio.Event()

    async def record(self, append: pb.Append) -> int:
        """Return the tokens the turn has once these are acknowledged, however long that takes.

        Appends of one turn are stored in the order of the calls. A caller awaits each before the
        next: one that is pushed back goes again later, and must not find its successor stored.

        Raises:
            ServiceError: the store's refusal of this append.
        """
        return (await self._answered(append)).num_tokens  # type: ignore[no-any-return]

    async def finish(self, finish: pb.FinishRolloutRequest) -> None:
        """Close a rollout, all of whose turns are recorded.

        Raises:
            ServiceError: the store's refusal.
        """
        await self._answered(finish)

    async def keep_sending(self) -> None:
        """Send what waits, message by message; runs until cancelled."""
        async with asyncio.TaskGroup() as senders:
            for _ in range(self._max_under_way):
                senders.create_task(self._send_messages())

    async def _send_messages(self) -> None:
        while True:
            await self._arrived.wait()
            message = self._next_message()
            self._num_idle -= 1
            await self._send(message)
            self._num_idle += 1

    async def _answered(self, part: _Part) -> Any:
        backoff: Backoff | None = None
        while True:
            while self._num_bytes >= self._max_waiting_bytes:
                self._has_room.clear()
                await self._has_room.wait()
            answer = await self._queued(part)
            if isinstance(answer, ServiceError):
                raise answer
            if not answer.HasField("error"):
                return answer
            error = from_status(answer.error)
            if not isinstance(error, UnavailableError | ExhaustedError):
                raise forwarded(error)
            backoff = backoff or Backoff()
            await backoff.wait(error.retry_after)

    def _queued(self, part: _Part) -> asyncio.Future[_Answer]:
        waiting = _Waiting(part, part.ByteSize(), asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._num_bytes += waiting.num_bytes
        self._arrived.set()
        return waiting.answer

    def _next_message(self) -> list[_Waiting]:
        message: list[_Waiting] = []
        room = self._max_message_bytes
        # Callers that were answered together come back together: all idle senders share them.
        share = min(MAX_PARTS, -(-len(self._waiting) // self._num_idle))
        while self._waiting and len(message) < share:
            if message and self._waiting[0].num_bytes > room:
                break
            waiting = self._waiting.popleft()
            if waiting.answer.cancelled():  # its agent is gone
                self._leave([waiting])
                continue
            message.append(waiting)
            room -= waiting.num_bytes
        if not self._waiting:
            self._arrived.clear()
        return message

    async def _send(self, message: list[_Waiting]) -> None:
        if not message:
            return
        request = pb.AppendSegmentsRequest(
            appends=[w.part for w in message if isinstance(w.part, pb.Append)],
            finishes=[w.part for w in message if isinstance(w.part, pb.FinishRolloutRequest)],
        )
        # The store answers appends first; sorting keeps the order within both kinds.
        message.sort(key=lambda w: isinstance(w.part, pb.FinishRolloutRequest))
        _MESSAGES.inc()
        answers: list[_Answer]
        try:
            # Every part is idempotent, so a message that failed goes again as it is.
            response = await answered(lambda: self._store.AppendSegments(request))
            answers = [*response.results, *response.finish_results]
            _APPENDS.inc(sum(not result.HasField("error") for result in response.results))
        except ServiceError as error:
            answers = [error] * len(message)
        for waiting, answer in zip(message, answers, strict=True):
            if not waiting.answer.cancelled():
                waiting.answer.set_result(answer)
        self._leave(message)

    def _leave(self, message: list[_Waiting]) -> None:
        self._num_bytes -= sum(waiting.num_bytes for waiting in message)
        if self._num_bytes < self._max_waiting_bytes:
            self._has_room.set()
