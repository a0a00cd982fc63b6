"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from rollout.http_gateway.api_error import CONTEXT_LENGTH_EXCEEDED, ApiError
from rollout.http_gateway.dialects.dialect import (
    Dialect,
    EventStream,
    Json,
    TurnRequest,
    event,
    rest,
    seamflow_fields,
)
from rollout.http_gateway.dialects.request_model import (
    AnswerFormat,
    Budget,
    NotText,
    RequestPart,
    SamplingRequest,
    TextPart,
    check_is_text,
    required,
    schema_of,
    text_of,
)

if TYPE_CHECKING:
    from seamflow.client import Turn
    from seamflow.rollout.v1.rollout_service_pb2 import TokenChunk

_SIGNATURE = "c2VhbWZsb3c="
"""Of all thinking: clients send thinking back as such only if it has one. It is not read."""
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class _Block(TextPart):
    thinking: str = ""
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[_Block] | None = None
    is_error: NotText = None


class _Message(RequestPart):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(RequestPart):
    name: str
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class _ToolChoice(RequestPart):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def as_sdk(self) -> str | Json:
        if self.type == "tool":
            return {"name": required("tool_choice.name", self.name)}
        return "required" if self.type == "any" else self.type


class _OutputConfig(RequestPart):
    format: AnswerFormat | None = None


class _Request(SamplingRequest):
    IGNORED: ClassVar = frozenset(
        {
            "betas",
            "cache_control",
            "context_management",
            "inference_geo",
            "metadata",
            "service_tier",
            "speed",
            "thinking",
        }
    )
    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {"mcp_servers": ([],)}

    model: str = ""
    messages: list[_Message] = Field(min_length=1, max_length=4096)
    system: str | list[_Block] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    output_config: _OutputConfig | None = None
    output_format: AnswerFormat | None = None
    max_tokens: Budget | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class AnthropicMessages(Dialect):
    NAMES: ClassVar[Mapping[str, str]] = {
        "response_schema_json": "output_config.format",
        "tool_choice.one_call": "tool_choice.disable_parallel_tool_use",
    }

    def parse(self, body: bytes) -> TurnRequest:
        request = _Request.read(body)
        required("max_tokens", request.max_tokens)
        return _turn_request(request)

    def reply(self, request: TurnRequest, turn: Turn) -> Json:
        return {
            **_head(request.body, turn.turn_id),
            "content": _blocks(turn),
            **_stop(turn),
            "usage": _usage(turn.num_prompt_tokens, len(turn.token_ids)),
            "seamflow": seamflow_fields(turn),
        }

    def events(self, request: TurnRequest, turn_id: str) -> EventStream:
        return _Events(_head(request.body, turn_id))


class CountTokens(AnthropicMessages):
    """Tokens of a prompt; nothing is sampled."""

    def parse(self, body: bytes) -> TurnRequest:
        return _turn_request(_Request.read(body))


class _Events(EventStream):
    def __init__(self, head: Json) -> None:
        self._head = head
        self._index = -1
        self._open = ""  # kind of the block that is open
        self._has_started = False
        self._sent = {"thinking": "", "text": ""}

    def start(self) -> bytes:
        return b""  # the size of the prompt comes with the first tokens; pings may come before

    def _started(self, num_prompt: int) -> bytes:
        if self._has_started:
            return b""
        self._has_started = True
        message = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(num_prompt, 0),
        }
        return _event("message_start", message=message)

    def keep_alive(self) -> bytes:
        return _event("ping")

    def chunk(self, chunk: TokenChunk) -> bytes:
        return (
            self._started(chunk.num_prompt_tokens)
            + self._text("thinking", chunk.reasoning_delta)
            + self._text("text", chunk.content_delta)
        )

    def end(self, turn: Turn) -> bytes:
        events = self._started(turn.num_prompt_tokens)
        events += self._text("thinking", rest(turn.reasoning, self._sent["thinking"]))
        events += self._text("text", rest(turn.text, self._sent["text"])) + self._closed()
        for block in _tool_uses(turn):
            arguments = json.dumps(block["input"], ensure_ascii=False)
            self._index += 1
            events += self._block_event("start", content_block={**block, "input": {}})
            delta = {"type": "input_json_delta", "partial_json": arguments}
            events += self._block_event("delta", delta=delta) + self._block_event("stop")
        usage = _usage(turn.num_prompt_tokens, len(turn.token_ids))
        fields = seamflow_fields(turn)
        events += _event("message_delta", delta=_stop(turn), usage=usage, seamflow=fields)
        return events + _event("message_stop")

    def error(self, error: ApiError) -> bytes:
        return event(anthropic_error(error), "error")

    def _text(self, kind: str, delta: str) -> bytes:
        if not delta:
            return b""
        events = b""
        if self._open != kind:
            events = self._closed()
            self._open = kind
            self._index += 1
            extra = {"signature": ""} if kind == "thinking" else {}
            start = {"type": kind, kind: "", **extra}
            events += self._block_event("start", content_block=start)
        self._sent[kind] += delta
        return events + self._block_event("delta", delta={"type": f"{kind}_delta", kind: delta})

    def _closed(self) -> bytes:
        was_open, self._open = self._open, ""
        if not was_open:
            return b""
        signature = b""
        if was_open == "thinking":
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            signature = self._block_event("delta", delta=delta)
        return signature + self._block_event("stop")

    def _block_event(self, what: str, **fields: Any) -> bytes:
        return _event(f"content_block_{what}", index=self._index, **fields)


def anthropic_error(error: ApiError) -> Json:
    """An error in the form of Anthropic's API."""
    by_default = "invalid_request_error" if error.status < 500 else "api_error"
    message = error.message
    if error.code == CONTEXT_LENGTH_EXCEEDED.lower() and error.num_tokens is not None:
        # The words by which harnesses know that they have to compact.
        message = f"prompt is too long: {error.num_tokens} tokens > {error.max_context} maximum"
    kind = _KINDS.get(error.status, by_default)
    return {"type": "error", "error": {"type": kind, "message": message}}


def _turn_request(request: _Request) -> TurnRequest:
    choice = request.tool_choice or _ToolChoice(type="auto")
    config = request.output_config or _OutputConfig()
    params = request.sampling(request.max_tokens)
    params.stop.extend(request.stop_sequences or ())
    return TurnRequest(
        body=request,
        messages=_messages(request),
        tools=[
            {"name": t.name, "description": t.description, "parameters": t.input_schema}
            for t in request.tools or ()
        ],
        tool_choice=choice.as_sdk(),
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        response_schema=schema_of("output_config.format", config.format or request.output_format),
        template_arguments=request.chat_template_kwargs or {},
        sampling=params,
        stream=bool(request.stream),
    )


def _messages(request: _Request) -> list[Json]:
    messages: list[Json] = []
    if request.system:
        messages.append({"role": "system", "content": text_of("system", request.system)})
    for index, message in enumerate(request.messages):
        path = f"messages[{index}].content"
        if message.role == "assistant":
            messages.append(_assistant_message(path, message.content))
        elif message.role == "user" and not isinstance(message.content, str):
            messages += _user_messages(path, message.content)
        else:
            messages.append({"role": message.role, "content": text_of(path, message.content)})
    return messages


def _user_messages(path: str, blocks: Sequence[_Block]) -> list[Json]:
    """Results of tools are messages of their own, the text between them too."""
    messages: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        here = f"{path}[{index}]"
        if block.type == "tool_result":
            text = text_of(f"{here}.content", block.content)
            call = required(f"{here}.tool_use_id", block.tool_use_id)
            messages.append({"role": "tool", "tool_call_id": call, "content": text})
        else:
            check_is_text(f"{here}.type", block.type)
            if not messages or messages[-1]["role"] != "user":
                messages.append({"role": "user", "content": ""})
            messages[-1]["content"] += block.text
    return messages


def _assistant_message(path: str, content: str | Sequence[_Block]) -> Json:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    text = reasoning = ""
    calls: list[Json] = []
    for index, block in enumerate(content):
        here = f"{path}[{index}]"
        if block.type == "thinking":
            reasoning += block.thinking
        elif block.type == "tool_use":
            name = required(f"{here}.name", block.name)
            calls.append(
                {"id": block.id, "function": {"name": name, "arguments": block.input or {}}}
            )
        elif block.type != "redacted_thinking":
            check_is_text(f"{here}.type", block.type)
            text += block.text
    return {
        "role": "assistant",
        "content": text,
        "reasoning_content": reasoning,
        "tool_calls": calls,
    }


def _head(body: _Request, turn_id: str) -> Json:
    return {"id": f"msg_{turn_id}", "type": "message", "role": "assistant", "model": body.model}


def _blocks(turn: Turn) -> list[Json]:
    blocks = [_block("thinking", turn.reasoning)] if turn.reasoning else []
    if turn.text:
        blocks.append(_block("text", turn.text))
    return blocks + _tool_uses(turn)


def _block(kind: str, text: str) -> Json:
    extra = {"signature": _SIGNATURE} if kind == "thinking" else {}
    return {"type": kind, kind: text, **extra}


def _tool_uses(turn: Turn) -> list[Json]:
    return [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": json.loads(call["function"]["arguments"] or "{}"),
        }
        for call in turn.tool_calls
    ]


def _stop(turn: Turn) -> Json:
    reason = "max_tokens" if turn.finish_reason == "length" else "end_turn"
    if turn.finish_reason == "stop" and turn.stop:
        reason = "stop_sequence"
    elif turn.finish_reason == "stop" and turn.tool_calls:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": turn.stop or None}


def _usage(num_prompt: int, num_sampled: int) -> Json:
    return {
        "input_tokens": num_prompt,
        "output_tokens": num_sampled,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)
