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
    from rollout.gateway.record.turn_record import TurnRecord

_FEATURE = "routed_experts"
"""Of a server that records them."""
_SECONDS = 60.0


async def routed_experts(
    server: Server,
    response: pb.GenerateTokensResponse,
    record: TurnRecord,
    kept: tokens_pb2.PackedTokens | None,
) -> tokens_pb2.RoutedExperts | None:
    """Routed experts up to the tokens of a response; None: none are reported, or later.

    Args:
        server: it has sent the response.
        record: of the turn, before the response.
        kept: tokens of the response that the turn keeps, where it is cut after them; else None.
    """
    if response.HasField("routed_experts"):
        return response.routed_experts
    if kept is None or _FEATURE not in server.features:
        return None
    begin = record.begin
    request = pb.GenerateTokensRequest(
        run_id=begin.run_id,
        attempt_id=f"{begin.turn_id}/{begin.attempt_id}/experts",
        token_ids=record.packed_ids + kept.token_ids,
        sampling=tokens_pb2.SamplingParams(max_new_tokens=1),
        routed_experts_from=record.routed_from,
    )
    call = server.stub.GenerateTokens(request, timeout=_SECONDS)
    try:
        with suppress(grpc.aio.AioRpcError):
            async for answer in call:
                if answer.HasField("routed_experts"):
                    return answer.routed_experts
    finally:
        call.cancel()
    return None
