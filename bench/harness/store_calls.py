"""BeginTurns and AppendTokens with one part per message, for tests and benchmarks."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

Part = pb.NewRollout | pb.NewTurn | pb.TokenAppend | pb.RolloutFinish

_FIELDS = {
    pb.NewRollout: ("BeginTurns", pb.BeginTurnsRequest, "rollouts", "rollouts"),
    pb.NewTurn: ("BeginTurns", pb.BeginTurnsRequest, "turns", "turns"),
    pb.TokenAppend: ("AppendTokens", pb.AppendTokensRequest, "appends", "results"),
    pb.RolloutFinish: ("AppendTokens", pb.AppendTokensRequest, "finishes", "finish_results"),
}
"""By part: rpc, request, field of the request, field of the response."""


def send(stub: Any, part: Part, **options: Any) -> Any:
    """The result of `part`, by a blocking stub.

    Raises:
        grpc.RpcError: the call or the part failed.
    """
    rpc, request, field, results = _FIELDS[type(part)]
    response = getattr(stub, rpc)(request(**{field: [part]}), **options)
    return _result(getattr(response, results)[0])


async def send_async(stub: Any, part: Part, **options: Any) -> Any:
    """The result of `part`, by a stub of grpc.aio.

    Raises:
        grpc.aio.AioRpcError: the call or the part failed.
    """
    rpc, request, field, results = _FIELDS[type(part)]
    response = await getattr(stub, rpc)(request(**{field: [part]}), **options)
    return _result(getattr(response, results)[0])


def packed(tokens: tokens_pb2.Tokens) -> tokens_pb2.PackedTokens:
    """The same tokens as bytes: the two messages are equal on the wire."""
    return tokens_pb2.PackedTokens.FromString(tokens.SerializeToString())


def unpacked(tokens: tokens_pb2.PackedTokens) -> tokens_pb2.Tokens:
    """The same tokens as numbers."""
    return tokens_pb2.Tokens.FromString(tokens.SerializeToString())


def _result(result: Any) -> Any:
    """What a result holds, or its error as that of a call with one part."""
    kind = result.WhichOneof("result")
    if kind != "error":
        return getattr(result, kind)
    error = result.error
    codes = {code.value[0]: code for code in grpc.StatusCode}
    details = grpc.aio.Metadata(("grpc-status-details-bin", error.SerializeToString()))
    raise grpc.aio.AioRpcError(
        codes[error.code], grpc.aio.Metadata(), details, details=error.message
    )
