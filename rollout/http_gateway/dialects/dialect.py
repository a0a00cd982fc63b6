"""What a dialect does: read a request as a turn, write the turn as its reply."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from seamflow.common.v1.tokens_pb2 import SamplingParams

from rollout.http_gateway.api_error import ApiError

if TYPE_CHECKING:
    from seamflow.client import Turn
    from seamflow.client.turn import Check
    from seamflow.rollout.v1.rollout_service_pb2 import TokenChunk

_LINE_BREAKS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One turn, as any dialect requests it; names are those of `Rollout.stream`."""

    body: Any
    """The parsed request, for the dialect's own reply."""
    messages: Sequence[Json] = ()
    """Conversation in the form of chat completions."""
    tools: Sequence[Json] = ()
    tool_choice: str | Json = "auto"
    """How the answer calls tools, as the SDK takes it."""
    parallel_tool_calls: bool = True
    response_schema: Json | None = None
    after_turn_id: str = ""
    """Recorded turn that the messages follow; empty: they are the whole conversation."""
    template_arguments: Json = field(default_factory=dict)
    token_ids: Sequence[int] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stream: bool = False
    return_prompt: bool = False
    return_token_bytes: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """What `Rollout.stream` takes of it, by name."""
        own = ("body", "stream")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}


class EventStream(ABC):
    """Writes one reply as server-sent events; each method returns the bytes to send."""

    @abstractmethod
    def start(self) -> bytes:
        """What comes first."""

    @abstractmethod
    def chunk(self, chunk: TokenChunk) -> bytes:
        """New tokens."""

    @abstractmethod
    def end(self, turn: Turn) -> bytes:
        """What the turn's end adds, up to the last event."""

    @abstractmethod
    def error(self, error: ApiError) -> bytes:
        """A failure in mid-stream, which SDKs raise."""

    def keep_alive(self) -> bytes:
        """A sign of life: by default a comment, which SDKs skip."""
        return b": keep-alive\n\n"


class Dialect(ABC):
    """The requests and answers of one API, such as chat completions."""

    NAMES: ClassVar[Mapping[str, str]] = {}
    """Fields of the contract in errors, and what this wire calls them."""

    @abstractmethod
    def parse(self, body: bytes) -> TurnRequest:
        """Read a request. Raises `ApiError` that names the parameter."""

    @abstractmethod
    def reply(self, request: TurnRequest, turn: Turn) -> Json:
        """The reply to a request that does not stream."""

    @abstractmethod
    def events(self, request: TurnRequest, turn_id: str) -> EventStream:
        """The reply to a request that streams."""


def openai_error(error: ApiError) -> Json:
    """An error in the form of OpenAI's API."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    by_default = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {
            "message": error.message,
            "type": kinds.get(error.status, by_default),
            "param": error.param,
            "code": error.code,
        }
    }


def _weight_spans(turn: Turn) -> list[Json]:
    """The weight version of each run of sampled tokens; adjacent spans of one version are one."""
    spans: list[dict[str, Any]] = []
    for span in turn.spans:
        last = spans[-1] if spans else None
        if last is not None and last["weight_version"] == span.weight_version:
            last["num_tokens"] += span.num_tokens
        else:
            spans.append(
                {
                    "start": span.start,
                    "num_tokens": span.num_tokens,
                    "weight_version": span.weight_version,
                }
            )
    return spans


def checks(turn: Turn) -> dict[str, Check]:
    """What was demanded of the answer, and whether it is so."""
    found = {"tool_choice": turn.tool_check, "schema": turn.schema_check}
    return {name: check for name, check in found.items() if check is not None}


def seamflow_fields(turn: Turn) -> Json:
    """What only seamflow adds to a reply, under the key "seamflow"."""
    fields: dict[str, Any] = {
        "turn_id": turn.turn_id,
        "weight_versions": _weight_spans(turn),
        "prefix_turn_id": turn.prefix_turn_id,
        "prefix_length": turn.prefix_length,
    }
    if turn.parse_error:
        fields["parse_error"] = turn.parse_error
    for name, check in checks(turn).items():
        fields[name] = {"result": check.result, "reason": check.reason}
    return fields


def token_logprobs(ids: Sequence[int], logprobs: Sequence[float]) -> list[Json]:
    """Log-probability of each token, which is named by its id: "token_id:N"."""
    return [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(ids, logprobs, strict=True)
    ]


def text_logprobs(token_bytes: Sequence[bytes], logprobs: Sequence[float]) -> list[Json]:
    """Log-probability of each token, which is named by its text.

    A token that is a part of a character has U+FFFD in its text; `bytes` are exact.
    """
    return [
        {
            "token": text.decode(errors="replace"),
            "logprob": logprob,
            "bytes": list(text),
            "top_logprobs": [],
        }
        for text, logprob in zip(token_bytes, logprobs, strict=True)
    ]


def content_logprobs(turn: Turn) -> list[Json]:
    """`text_logprobs` of the tokens that the content of an answer has a part of."""
    sampled = b"".join(turn.token_bytes)
    content = turn.text.removeprefix(turn.opening).encode()
    start = sampled.rfind(content)
    ends = [*accumulate(map(len, turn.token_bytes), initial=0)]
    kept = [
        n
        for n, (begin, end) in enumerate(pairwise(ends))
        if start < 0 or (begin < start + len(content) and end > start)
    ]
    return text_logprobs([turn.token_bytes[n] for n in kept], [turn.logprobs[n] for n in kept])


def rest(whole: str, sent: str) -> str:
    """What of `whole` has not been sent. Raises `ValueError`: something else has been sent."""
    if not whole.startswith(sent):
        raise ValueError(f"{len(sent)} characters were sent that the answer does not begin with")
    return whole[len(sent) :]


def event(data: Json | str, name: str | None = None) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    # Readers that split lines as str.splitlines does would take these for line breaks.
    text = text.translate(_LINE_BREAKS)
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {text}\n\n".encode()
