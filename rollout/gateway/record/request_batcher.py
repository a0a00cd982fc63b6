"""Group commit: requests of many turns are sent as parts of a few messages.

A limited number of messages is in flight; parts that arrive in the meantime form the next one. So
messages grow with the load, and a single turn is sent without delay.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from seamflow.errors import SeamflowError
from seamflow.retry import Backoff, may_retry

from services.chassis.errors import ServiceError
from services.chassis.rpc import tracing
from services.chassis.rpc.status import from_dependency

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
    """Batches the parts of concurrent callers; run `keep_sending` in the background."""

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
