"""Streams of sampled tokens: from the server that a turn waited for, or from the quicker of two."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc.aio
from seamflow.rollout.v1 import rollout_server_service_pb2 as pb

from services.chassis import metrics

if TYPE_CHECKING:
    from rollout.gateway.dispatch.policies import Ask
    from rollout.gateway.dispatch.server_state import Server
    from rollout.gateway.dispatch.waiting_turns import WaitingTurns

__all__ = ["Stream", "opened"]

_HEDGED = metrics.counter(
    "rollout_gateway", "hedged_turns_total", "Turns started on a second server too."
)

Request = Callable[[], tuple[pb.GenerateTokensRequest, float | None]]
"""What to ask a server, and the seconds that are left for it."""
_First = asyncio.Future[pb.GenerateTokensResponse | None]


class Stream:
    """One call of GenerateTokens. Iterate over it once; `close` ends the server's work."""

    def __init__(self, waiting: WaitingTurns, server: Server, request: Request) -> None:
        """Call `server`, on which `waiting` has counted the turn.

        Raises `UsageError` if it has just left, and its channel is closed.
        """
        self.server = server
        """Who samples."""
        self._waiting = waiting
        wanted, timeout = request()
        try:
            self._call = server.stub.GenerateTokens(wanted, timeout=timeout)
        except grpc.aio.UsageError:
            waiting.left(server)
            raise
        self._responses = aiter(self._call)
        self._first: _First | None = None
        self._closed = False

    def first(self) -> _First:
        """The first response, before the iteration; None: there is none."""
        if self._first is None:
            self._first = asyncio.ensure_future(anext(self._responses, None))
            # Whoever loses a race may fail unseen.
            self._first.add_done_callback(lambda first: first.cancelled() or first.exception())
        return self._first

    def __aiter__(self) -> AsyncIterator[pb.GenerateTokensResponse]:
        """All responses; raises what the call fails with."""
        return self._responses if self._first is None else self._all(self._first)

    async def _all(self, first: _First) -> AsyncGenerator[pb.GenerateTokensResponse]:
        if (response := await first) is not None:
            yield response
            async for response in self._responses:
                yield response

    def close(self) -> None:
        """Cancel the call and give the place on the server back, once."""
        if not self._closed:
            self._closed = True
            self._call.cancel()
            if self._first is not None:
                self._first.cancel()
            self._waiting.left(self.server)


@asynccontextmanager
async def opened(
    waiting: WaitingTurns,
    ask: Ask,
    pinned: int | None,
    request: Request,
    hedge_after: float | None,
) -> AsyncIterator[Stream]:
    """A stream on the server that the turn waits for.

    With `hedge_after`, a turn that has no token after so many seconds is started on a second server
    too, if one has room: whoever brings tokens first has the turn, the other one is cancelled.
    """
    stream = Stream(waiting, await waiting.server(ask, pinned), request)
    try:
        if hedge_after is not None:
            done, _ = await asyncio.wait({stream.first()}, timeout=hedge_after)
            other = None if done else waiting.another(ask, pinned, stream.server)
            if other is not None:
                _HEDGED.inc()
                stream = await _quicker(stream, Stream(waiting, other, request))
        yield stream
    finally:
        stream.close()


async def _quicker(*streams: Stream) -> Stream:
    """The one that brings tokens first, or fails last; the others are closed."""
    racing = {stream.first(): stream for stream in streams}
    winner: Stream | None = None
    try:
        while winner is None:
            done, pending = await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
            if not pending or any(map(_has_tokens, done)):
                winner = racing[max(done, key=_has_tokens)]
            else:
                for first in done:
                    racing.pop(first).close()
        return winner
    finally:
        for stream in streams:
            if stream is not winner:
                stream.close()


def _has_tokens(first: _First) -> bool:
    if first.cancelled() or first.exception() is not None:
        return False
    response = first.result()
    return response is not None and bool(response.tokens.token_ids)
