"""The send buffer of one stream: it decouples a turn from how fast its agent reads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Coroutine

from seamflow.rollout.v1 import rollout_service_pb2 as pb

from rollout.gateway.record import packed_tokens


class SendBuffer:
    """Events that the agent has not read yet.

    An agent that stops reading occupies no slot on a server: its turn is sampled and recorded to
    the end. Unread chunks are merged, so the buffer holds at most the tokens of one turn.
    """

    def __init__(self, heartbeat_seconds: float) -> None:
        """Send a heartbeat after `heartbeat_seconds` without an event."""
        self._heartbeat_seconds = heartbeat_seconds
        self._unread: deque[pb.TokenChunk | pb.TurnEnd] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: pb.TokenChunk | pb.TurnEnd) -> None:
        """Append an event; the caller must not use it again."""
        last = self._unread[-1] if self._unread else None
        if isinstance(last, pb.TokenChunk) and isinstance(event, pb.TokenChunk):
            _extend(last, event)
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


def _extend(chunk: pb.TokenChunk, more: pb.TokenChunk) -> None:
    packed_tokens.extend_spans(chunk.tokens.spans, more.tokens.spans, len(chunk.tokens.token_ids))
    chunk.tokens.token_ids.extend(more.tokens.token_ids)
    chunk.tokens.logprobs.extend(more.tokens.logprobs)
    chunk.text += more.text
    chunk.content_delta += more.content_delta
    chunk.reasoning_delta += more.reasoning_delta
    chunk.token_bytes.extend(more.token_bytes)


def _message(event: pb.TokenChunk | pb.TurnEnd) -> pb.GenerateResponse:
    if isinstance(event, pb.TokenChunk):
        return pb.GenerateResponse(chunk=event)
    return pb.GenerateResponse(end=event)
