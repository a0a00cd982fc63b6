"""rollout.v1.RolloutServerService: translates messages for `EngineLifecycle`, without logic."""

# ruff: noqa: N802 -- rpcs are named by the contract

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from seamflow.common.v1 import tokens_pb2
from seamflow.durations import seconds_of, to_timestamp
from seamflow.rollout.v1 import rollout_server_service_pb2 as pb
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceServicer

from rollout.server.engine_lifecycle import EngineLifecycle, State
from rollout.server.engines.engine import (
    Chunk,
    ContextLengthError,
    EngineFailed,
    EngineRequest,
    FinishReason,
    MemoryNotReleased,
    PauseMode,
    RequestError,
    Sampling,
    VersionSource,
    WeightsError,
)
from rollout.server.weights.transport import NotVisible, PhaseTimeout, SourceLost
from services.chassis import metrics
from services.chassis.errors import (
    Reason,
    context_length_exceeded,
    failed_precondition,
    invalid_argument,
    unavailable,
)
from services.lib.token_bytes import BYTES_PER_TOKEN, pack_ids, pack_logprobs, unpack_ids

T = TypeVar("T")

# Features of every engine; `EngineInfo.features` adds the optional ones.
_FEATURES = frozenset({"pause_retract", "pause_abort"})

_ROUTED_BYTES = 8 << 20
"""Of routed experts in one message."""
_TOKENS = metrics.counter("rollout_server", "sampled_tokens_total", "Tokens sent to callers.")
_FINISHES: dict[FinishReason | None, tokens_pb2.FinishReason.ValueType] = {
    None: tokens_pb2.FINISH_REASON_UNSPECIFIED,
    **{each: tokens_pb2.FinishReason.Value(f"FINISH_REASON_{each.name}") for each in FinishReason},
}
_MODES = {pb.PauseMode.Value(f"PAUSE_MODE_{each.name}"): each for each in PauseMode}
_SOURCES = {s: tokens_pb2.VersionSource.Value(f"VERSION_SOURCE_{s.name}") for s in VersionSource}
_STATES = {
    # To callers, a server without current weights is a paused one.
    State.LOADING: pb.SERVER_STATE_PAUSED,
    State.SERVING: pb.SERVER_STATE_SERVING,
    State.PAUSED: pb.SERVER_STATE_PAUSED,
    State.RELEASED: pb.SERVER_STATE_RELEASED,
    State.DRAINING: pb.SERVER_STATE_DRAINING,
}


class RolloutServerServicer(RolloutServerServiceServicer):
    def __init__(self, server: EngineLifecycle, *, server_id: str, run_id: str) -> None:
        self._server = server
        self._server_id = server_id
        self._run_id = run_id

    async def GenerateTokens(
        self, request: pb.GenerateTokensRequest, context: Any
    ) -> AsyncIterator[pb.GenerateTokensResponse]:
        if request.run_id != self._run_id:
            raise invalid_argument(
                "run_id", request.run_id, f"this server serves run {self._run_id}"
            )
        with _service_errors():
            turn = self._server.engine.generate(_engine_request(request))
            with self._server.turns.running():
                async with aclosing(turn) as chunks:  # type: ignore[type-var]
                    async for chunk in chunks:
                        _TOKENS.inc(len(chunk.token_ids))
                        for response in self._responses(chunk):
                            yield response

    def _responses(self, chunk: Chunk) -> Iterator[pb.GenerateTokensResponse]:
        """A chunk's messages: several if it has the routed experts of many tokens."""
        *parts, last = chunk.routed.parts(_ROUTED_BYTES) if chunk.routed else [None]
        for part in parts:
            yield self._response(replace(chunk, finish=None, routed=part))
            chunk = replace(chunk, token_ids=(), logprobs=())
        yield self._response(replace(chunk, routed=last))

    def _response(self, chunk: Chunk) -> pb.GenerateTokensResponse:
        tokens = tokens_pb2.PackedTokens(
            token_ids=pack_ids(chunk.token_ids), logprobs=pack_logprobs(chunk.logprobs)
        )
        if chunk.token_ids:
            tokens.spans.add(
                num_tokens=len(chunk.token_ids),
                origin=tokens_pb2.ORIGIN_POLICY,
                weight_version=chunk.weight_version,
                version_source=_SOURCES[chunk.version_source],
                server_id=self._server_id,
            )
        return pb.GenerateTokensResponse(
            tokens=tokens,
            finish_reason=_FINISHES[chunk.finish],
            routed_experts=None if chunk.routed is None else chunk.routed.message(),
        )

    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.PauseResponse:
        if request.mode not in _MODES:
            raise invalid_argument("mode", request.mode, "must be RETRACT, ABORT or IN_PLACE")
        paused = await _shielded(self._server.pause(_MODES[request.mode]))
        return pb.PauseResponse(num_turns=paused)

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeResponse:
        await _shielded(self._server.resume())
        return pb.ResumeResponse()

    async def UpdateWeights(
        self, request: pb.UpdateWeightsRequest, context: Any
    ) -> pb.UpdateWeightsResponse:
        version = request.weight_version if request.HasField("weight_version") else None
        hold = seconds_of(request.hold) if request.HasField("hold") else None
        if hold is not None and hold < 0:
            raise invalid_argument("hold", hold, "give the seconds to keep the version; 0 ends it")
        loaded = await _shielded(self._server.update(version, hold))
        return pb.UpdateWeightsResponse(weight_version=loaded)

    async def ReleaseMemory(
        self, request: pb.ReleaseMemoryRequest, context: Any
    ) -> pb.ReleaseMemoryResponse:
        return pb.ReleaseMemoryResponse(num_bytes=await _shielded(self._server.release()))

    async def RestoreMemory(
        self, request: pb.RestoreMemoryRequest, context: Any
    ) -> pb.RestoreMemoryResponse:
        return pb.RestoreMemoryResponse(weight_version=await _shielded(self._server.restore()))

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Any
    ) -> pb.GetServerInfoResponse:
        engine = self._server.engine
        load = engine.load()
        return pb.GetServerInfoResponse(
            server_id=self._server_id,
            state=_STATES[self._server.state],
            weight_version=engine.weight_version,
            num_running=load.running,
            num_queued=load.queued,
            max_running=engine.info.max_running,
            max_context=engine.info.max_context,
            tokens_per_second=load.tokens_per_second,
            engine=engine.info.name,
            features=sorted(_FEATURES | engine.info.features),
            loaded_versions=[
                pb.LoadedVersion(weight_version=version, load_time=to_timestamp(seconds))
                for version, seconds in self._server.loaded_versions
            ],
        )


def _prefix(packed: bytes) -> list[int]:
    if len(packed) % BYTES_PER_TOKEN:
        cure = f"give {BYTES_PER_TOKEN} bytes for each id"
        raise invalid_argument("token_ids", f"{len(packed)} bytes", cure)
    return unpack_ids(packed)


def _engine_request(request: pb.GenerateTokensRequest) -> EngineRequest:
    # What is absent has the default of the engines, which is the contract's.
    given = {field.name: value for field, value in request.sampling.ListFields()}
    given.pop("stop", None)  # the gateway finds them
    stop_token_ids = tuple(given.pop("stop_token_ids", ()))
    return EngineRequest(
        request_id=request.attempt_id,
        token_ids=tuple(_prefix(request.token_ids)),
        sampling=Sampling(**given, stop_token_ids=stop_token_ids),
        chunk_seconds=seconds_of(request.chunk_interval),
        routed_from=request.routed_experts_from
        if request.HasField("routed_experts_from")
        else None,
    )


@contextmanager
def _service_errors() -> Iterator[None]:
    """Translate errors of the engine and of weight transfers to `ServiceError`."""
    try:
        yield
    except ContextLengthError as error:
        raise context_length_exceeded(error.num_tokens, error.max_context) from error
    except RequestError as error:
        raise invalid_argument(error.field, error.value, error.cure) from error
    except EngineFailed as error:
        message = "the engine has failed and this server will restart"
        raise unavailable(Reason.ENGINE_FAILED, message) from error
    except (NotVisible, PhaseTimeout, SourceLost) as error:
        raise unavailable(Reason.DEPENDENCY_UNAVAILABLE, str(error)) from error
    except MemoryNotReleased as error:
        raise failed_precondition(Reason.UNSUPPORTED, str(error)) from error
    except WeightsError as error:
        raise failed_precondition(Reason.CHECKSUM_MISMATCH, str(error)) from error


async def _shielded(change: Coroutine[Any, Any, T]) -> T:
    """Complete a transition even if the caller disconnects: half of one has no defined state."""
    with _service_errors():
        return await asyncio.shield(asyncio.ensure_future(change))
