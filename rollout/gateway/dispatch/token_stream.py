"""One stream of sampled tokens, from the rollout server that a turn waited for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from seamflow.rollout.v1 import rollout_server_service_pb2 as pb

if TYPE_CHECKING:
    from rollout.gateway.dispatch.policies import TurnRequest
    from rollout.gateway.dispatch.server_state import Server
    from rollout.gateway.dispatch.waiting_turns import WaitingTurns

Request = Callable[[], tuple[pb.GenerateTokensRequest, float | None]]
"""Builds the request once a server is known; with the seconds left for it, None: no deadline."""


@dataclass(frozen=True, slots=True)
class TokenStream:
    """One call of GenerateTokens."""

    server: Server
    """The server that samples."""
    responses: AsyncIterator[pb.GenerateTokensResponse]
    """Its responses; raises the `AioRpcError` that the call fails with."""


@asynccontextmanager
async def open_stream(
    waiting: WaitingTurns, turn: TurnRequest, pinned_version: int | None, request: Request
) -> AsyncIterator[TokenStream]:
    """Wait for a server and stream from it; on exit the server's work ends and its slot is free.

    Raises:
        ServiceError: RESOURCE_EXHAUSTED, the queue is full.
        UsageError: the server left the run before the call, so its channel is closed.
    """
    server = await waiting.acquire(turn, pinned_version)
    try:
        generate, timeout = request()
        call = server.stub.GenerateTokens(generate, timeout=timeout)
        try:
            yield TokenStream(server, aiter(call))
        finally:
            call.cancel()
    finally:
        waiting.release(server)
