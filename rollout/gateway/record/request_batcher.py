"""Calls of many turns as few messages: what waits goes out as one, each part for itself.

A few messages are under way at a time; whatever arrives meanwhile is in the next one. So messages
grow with the load, and a single turn waits for nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from seamflow.errors import ExhaustedError, SeamflowError, UnavailableError
from seamflow.retry import Backoff

from rollout.gateway.calls import to_service_error
from services.chassis.errors import ServiceError

__all__ = ["RequestBatcher", "Send"]

MAX_MESSAGE_BYTES = 1 << 20
"""A message stops growing here; one part that is larger goes alone."""
MAX_PARTS = 1024
"""As many parts at most as the store takes."""
MAX_UNDER_WAY = 2
"""Messages at a time: while the store works on one, the next is packed."""
MAX_WAITING_BYTES = 64 << 20
"""Beyond this, callers wait, and with them the streams their tokens come from."""

Send = Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]
"""Brings parts to the store as one message; returns for each what it is answered, or the
`SeamflowError` that it is refused with. Raises `ServiceError`: the refusal of all of them."""


@dataclass(slots=True)
class _Waiting:
    part: Message
    num_bytes: int
    answer: asyncio.Future[Any]


class RequestBatcher:
    """Parts of messages, from callers who wait; `keep_sending` runs as long as it is used."""

    def __init__(
        self,
        send: Send,
        *,
        max_under_way: int = MAX_UNDER_WAY,
        max_parts: int = MAX_PARTS,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self._send_parts = send
        self._max_under_way = self._num_idle = max_under_way
        self._max_parts = max_parts
        self._max_message_bytes = max_message_bytes
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: deque[_Waiting] = deque()
        self._num_bytes = 0  # waiting or under way
        self._arrived = asyncio.Event()
        self._has_room = asyncio.Event()

    async def send(self, part: Message) -> Any:
        """Send `part`, again and again while the store is away or pushes it back.

        Parts go out in the order of the calls.

        Raises:
            ServiceError: the store's refusal of this part.
        """
        backoff: Backoff | None = None
        while True:
            while self._num_bytes >= self._max_waiting_bytes:
                self._has_room.clear()
                await self._has_room.wait()
            answer = await self._queued(part)
            if isinstance(answer, ServiceError):
                raise answer
            if not isinstance(answer, SeamflowError):
                return answer
            if not isinstance(answer, UnavailableError | ExhaustedError):
                raise to_service_error(answer)
            backoff = backoff or Backoff()
            await backoff.wait(answer.retry_after)

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

    def _queued(self, part: Message) -> asyncio.Future[Any]:
        waiting = _Waiting(part, part.ByteSize(), asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._num_bytes += waiting.num_bytes
        self._arrived.set()
        return waiting.answer

    def _next_message(self) -> list[_Waiting]:
        message: list[_Waiting] = []
        room = self._max_message_bytes
        # Callers that were answered together come back together: all idle senders share them.
        share = min(self._max_parts, -(-len(self._waiting) // self._num_idle))
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
        answers: Sequence[Any]
        try:
            answers = await self._send_parts([waiting.part for waiting in message])
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
