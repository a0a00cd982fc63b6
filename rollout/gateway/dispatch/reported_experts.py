"""Requests the routed experts of a turn that was cut from its server.

An engine may report experts only when a request ends, as SGLang does. A turn that a stop string or
the end of a forced answer cuts is aborted before: one more token is requested
after it and dropped, and with it the engine reports what it chooses for the turn's tokens.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import grpc.aio
from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_server_service_pb2 as pb

if TYPE_CHECKING:
    from rollout.gateway.dispatch.server_state import Server

ROUTED_EXPERTS = "routed_experts"
"""Feature of a server that records them."""
_SECONDS = 60.0


async def reported_experts(
    server: Server, request: pb.GenerateTokensRequest
) -> tokens_pb2.RoutedExperts | None:
    """The experts that the first report has; None: the server does not answer."""
    call = server.stub.GenerateTokens(request, timeout=_SECONDS)
    try:
        with suppress(grpc.aio.AioRpcError):
            async for response in call:
                if response.HasField("routed_experts"):
                    return response.routed_experts
    finally:
        call.cancel()
    return None
