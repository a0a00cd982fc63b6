"""POST /inference/v1/generate: prompt ids in, sampled ids out, in the form of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from rollout.http_gateway.api_error import ApiError
from rollout.http_gateway.dialects.dialect import (
    Dialect,
    EventStream,
    Json,
    TurnRequest,
    event,
    openai_error,
    seamflow_fields,
    token_logprobs,
)
from rollout.http_gateway.dialects.request_model import (
    Budget,
    RequestModel,
    SamplingRequest,
    TokenId,
)

if TYPE_CHECKING:
    from seamflow.client import Turn
    from seamflow.rollout.v1.rollout_service_pb2 import TokenChunk


class _Sampling(SamplingRequest):
    IGNORED: ClassVar = frozenset(
        {"detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind"}
    )
    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "n": (1,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
        "logit_bias": ({},),
        "min_tokens": (0,),
        "include_stop_str_in_output": (True, False),
    }

    max_tokens: Budget | None = None
    logprobs: Literal[0, 1] | bool | None = None
    prompt_logprobs: Literal[0] | None = None


class _Request(RequestModel):
    IGNORED: ClassVar = frozenset({"cache_salt", "priority", "request_id"})
    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {"stream_options": ({},)}

    model: str = ""
    token_ids: list[TokenId] = Field(min_length=1)
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    stream: bool | None = None


class TokenGenerate(Dialect):
    def parse(self, body: bytes) -> TurnRequest:
        request = _Request.read(body)
        sampling = _Sampling.check(request.sampling_params, "sampling_params.")
        return TurnRequest(
            body=request,
            token_ids=request.token_ids,
            sampling=sampling.sampling(sampling.max_tokens),
            stream=bool(request.stream),
        )

    def reply(self, request: TurnRequest, turn: Turn) -> Json:
        choice = {
            "index": 0,
            "token_ids": turn.token_ids,
            "logprobs": {"content": token_logprobs(turn.token_ids, turn.logprobs)},
            "finish_reason": turn.finish_reason,
            "stop_reason": turn.stop or None,
        }
        return {
            "request_id": turn.turn_id,
            "choices": [choice],
            "prompt_logprobs": None,
            "seamflow": seamflow_fields(turn),
        }

    def events(self, request: TurnRequest, turn_id: str) -> EventStream:
        return _Events(turn_id)


class _Events(EventStream):
    def __init__(self, turn_id: str) -> None:
        self._turn_id = turn_id

    def start(self) -> bytes:
        return b""

    def chunk(self, chunk: TokenChunk) -> bytes:
        ids = list(chunk.tokens.token_ids)
        return self._event(
            token_ids=ids, logprobs={"content": token_logprobs(ids, chunk.tokens.logprobs)}
        )

    def end(self, turn: Turn) -> bytes:
        last = self._event(
            {"seamflow": seamflow_fields(turn)},
            token_ids=[],
            logprobs=None,
            finish_reason=turn.finish_reason,
            stop_reason=turn.stop or None,
        )
        return last + event("[DONE]")

    def error(self, error: ApiError) -> bytes:
        return event(openai_error(error))

    def _event(self, fields: Json | None = None, **choice: Any) -> bytes:
        first = {"index": 0, "finish_reason": None, **choice}
        return event({"request_id": self._turn_id, "choices": [first], **(fields or {})})
