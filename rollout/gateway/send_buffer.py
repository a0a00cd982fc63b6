"""The send buffer of one stream: it decouples a turn from how fast its agent reads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field

from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_service_pb2 as pb

from rollout.gateway.prompt.answer.answer_parser import Delta
from rollout.gateway.record import packed_tokens


@dataclass(slots=True)
class SentChunk:
    """Recorded tokens for the agent."""

    offset: int
    """Index of the first among the turn's sampled tokens."""
    tokens: tokens_pb2.PackedTokens
    """The tokens; spans count from the first one."""
    text: str = ""
    """Text that is complete with them, if the agent asked for text."""
    delta: Delta = field(default_factory=Delta)
    """What they add to the parsed answer, if the agent asked for text."""
    num_prompt_tokens: int = 0
    token_bytes: list[bytes] = field(default_factory=list)
    """Of each token, if the agent asked for them."""

    def event(self) -> pb.GenerateResponse:
        """The message for the agent: packed tokens equal `Tokens` on the wire."""
        tokens = tokens_pb2.Tokens.FromString(self.tokens.SerializeToString())
        chunk = pb.TokenChunk(
            offset=self.offset,
            tokens=tokens,
            text=self.text,
            content_delta=self.delta.content,
            reasoning_delta=self.delta.reasoning,
            num_prompt_tokens=self.num_prompt_tokens,
            token_bytes=self.token_bytes,
        )
        return pb.GenerateResponse(chunk=chunk)


class SendBuffer:
    """Events that the agent has not read yet.

    An agent that stops reading occupies no slot on a server: its turn is sampled and recorded to
    the end. Unread chunks are merged, so the buffer holds at most the tokens of one turn.
    """

    def __init__(self, heartbeat_seconds: float) -> None:
        """Send a heartbeat after `heartbeat_seconds` without an event."""
        self._heartbeat_seconds = heartbeat_seconds
        self._unread: deque[SentChunk | pb.TurnEnd] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: SentChunk | pb.TurnEnd) -> None:
        """Append an event; the caller must not use it again."""
        last = self._unread[-1] if self._unread else None
        if isinstance(last, SentChunk) and isinstance(event, SentChunk):
            packed_tokens.extend(last.tokens, event.tokens)
            last.text += event.text
            last.delta.add(event.delta)
            last.token_bytes += event.token_bytes
        else:
            self._unread.append(event)
        self._wake()

    async def events(
        self, turn: Coroutine[None, None, None]
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Run `turn`, which puts events here; yield these and heartbeats, raise its failure.

        Closing the iteration cancels the turn.
        """
        running = asyncio.ensure_future(turn)
        running.add_done_callback(lambda _: self._wake())
        try:
            while self._unread or not running.done():
                if self._unread:
                    yield _message(self._unread.popleft())
                elif not await self._wait_for_event(running):
                    yield pb.GenerateResponse(heartbeat=pb.Heartbeat())
            running.result()
        finally:
            # The agent is gone or the turn has ended: no server may continue it.
            running.cancel()
            await asyncio.wait({running})

    async def _wait_for_event(self, running: asyncio.Future[None]) -> bool:
        """Wait for an event or the end of the turn; False: a heartbeat is due."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(self._heartbeat_seconds, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None
        return bool(self._unread) or running.done()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _message(event: SentChunk | pb.TurnEnd) -> pb.GenerateResponse:
    return event.event() if isinstance(event, SentChunk) else pb.GenerateResponse(end=event)
