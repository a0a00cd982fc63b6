"""POST /v1/chat/completions: OpenAI's chat completions, with vLLM's token fields."""

from __future__ import annotations

import ast
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from rollout.http_gateway.api_error import ApiError
from rollout.http_gateway.dialects.dialect import (
    Dialect,
    EventStream,
    Json,
    TurnRequest,
    event,
    openai_error,
    rest,
    seamflow_fields,
    text_logprobs,
    token_logprobs,
)
from rollout.http_gateway.dialects.request_model import (
    AnswerFormat,
    Budget,
    NotText,
    OpenAIChoice,
    RequestPart,
    SamplingRequest,
    TextPart,
    check_is_text,
    openai_choice,
    schema_of,
)

if TYPE_CHECKING:
    from seamflow.client import Turn
    from seamflow.rollout.v1.rollout_service_pb2 import TokenChunk


class _Function(RequestPart):
    name: str
    arguments: str | dict[str, Any] | None = None


class _ToolCall(RequestPart):
    id: str | None = None
    function: _Function


class _Message(RequestPart):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    audio: NotText = None
    function_call: NotText = None
    images: NotText = None
    refusal: NotText = None

    def as_json(self) -> Json:
        message = self.model_dump(exclude_none=True)
        if self.role == "developer":  # OpenAI's new name of it
            message["role"] = "system"
        return message


class _FunctionTool(RequestPart):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(RequestPart):
    type: Literal["function"]
    function: _FunctionTool


class _StreamOptions(RequestPart):
    include_usage: bool | None = None


class _Request(SamplingRequest):
    IGNORED: ClassVar = frozenset(
        {
            "metadata",
            "prediction",
            "prompt_cache_key",
            "prompt_cache_retention",
            "reasoning_effort",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
            "verbosity",
        }
    )
    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "n": (1,),
        "best_of": (1,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
        "logit_bias": ({},),
        "modalities": (["text"],),
        "functions": ([],),
        "skip_special_tokens": (True,),
        "add_generation_prompt": (True,),
        "min_tokens": (0,),
    }

    model: str = ""
    messages: list[_Message] = Field(min_length=1, max_length=4096)
    tools: list[_Tool] | None = None
    tool_choice: OpenAIChoice = None
    parallel_tool_calls: bool | None = None
    response_format: AnswerFormat | None = None
    max_tokens: Budget | None = None
    max_completion_tokens: Budget | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatCompletions(Dialect):
    NAMES: ClassVar[Mapping[str, str]] = {
        "response_schema_json": "response_format",
        "tool_choice.one_call": "parallel_tool_calls",
    }

    def parse(self, body: bytes) -> TurnRequest:
        request = _Request.read(body)
        messages = [message.as_json() for message in request.messages]
        check_text_only(messages)
        messages = [with_calls(message) for message in messages]
        tools = request.tools or []
        choice = openai_choice(request.tool_choice, [tool.function.name for tool in tools])
        budget = request.max_completion_tokens or request.max_tokens
        return TurnRequest(
            body=request,
            messages=messages,
            tools=[tool.model_dump(exclude_none=True) for tool in tools],
            tool_choice=choice,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            response_schema=schema_of("response_format.json_schema", request.response_format),
            template_arguments=request.chat_template_kwargs or {},
            sampling=request.sampling(budget),
            stream=bool(request.stream),
            return_prompt=bool(request.return_token_ids),
            return_token_bytes=bool(request.logprobs and not request.return_tokens_as_token_ids),
        )

    def reply(self, request: TurnRequest, turn: Turn) -> Json:
        body: _Request = request.body
        choice: dict[str, Any] = {
            "index": 0,
            "message": _answer(turn),
            "logprobs": _logprobs(body, turn.token_ids, turn.token_bytes, turn.logprobs),
            "finish_reason": _finish_reason(turn),
            "stop_reason": turn.stop or None,
        }
        fields: dict[str, Any] = {}
        if body.return_token_ids:
            choice["token_ids"] = turn.token_ids
            fields["prompt_token_ids"] = turn.prompt_token_ids
        return {
            "id": f"chatcmpl-{turn.turn_id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.model,
            "choices": [choice],
            "usage": _usage(turn),
            **fields,
            "seamflow": seamflow_fields(turn),
        }

    def events(self, request: TurnRequest, turn_id: str) -> EventStream:
        return _Events(request.body, turn_id)


class _Events(EventStream):
    def __init__(self, body: _Request, turn_id: str) -> None:
        self._body = body
        self._content = self._reasoning = ""
        self._head = {
            "id": f"chatcmpl-{turn_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": body.model,
        }

    def start(self) -> bytes:
        return self._event({"role": "assistant", "content": ""})

    def chunk(self, chunk: TokenChunk) -> bytes:
        self._content += chunk.content_delta
        self._reasoning += chunk.reasoning_delta
        choice: dict[str, Any] = {}
        if self._body.logprobs:
            tokens, texts = chunk.tokens, chunk.token_bytes
            choice["logprobs"] = _logprobs(self._body, tokens.token_ids, texts, tokens.logprobs)
        if self._body.return_token_ids:
            choice["token_ids"] = list(chunk.tokens.token_ids)
        delta = _delta(chunk.content_delta, chunk.reasoning_delta)
        return self._event(delta, **choice) if delta or choice else b""

    def end(self, turn: Turn) -> bytes:
        delta = _delta(rest(turn.text, self._content), rest(turn.reasoning, self._reasoning))
        if turn.tool_calls:
            # Each whole: some harnesses join fragments of calls wrongly.
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(turn.tool_calls)]
        fields: dict[str, Any] = {"seamflow": seamflow_fields(turn)}
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = turn.prompt_token_ids
        events = self._event(delta) if delta else b""
        events += self._event(
            {}, fields, finish_reason=_finish_reason(turn), stop_reason=turn.stop or None
        )
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            events += event({**self._head, "choices": [], "usage": _usage(turn)})
        return events + event("[DONE]")

    def error(self, error: ApiError) -> bytes:
        return event(openai_error(error))

    def _event(self, delta: Json, fields: Json | None = None, **choice: Any) -> bytes:
        first = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **choice}
        return event({**self._head, "choices": [first], **(fields or {})})


def check_text_only(messages: Sequence[Json]) -> None:
    """Raises `ApiError` for content that is no text."""
    for i, message in enumerate(messages):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            check_is_text(f"messages[{i}].content[{j}].type", part["type"])


def _answer(turn: Turn) -> Json:
    content = None if turn.tool_calls and not turn.text else turn.text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if turn.reasoning:
        # The name of DeepSeek's API and that of vLLM's.
        message["reasoning_content"] = message["reasoning"] = turn.reasoning
    if turn.tool_calls:
        message["tool_calls"] = turn.tool_calls
    return message


def _delta(content: str, reasoning: str) -> dict[str, Any]:
    delta: dict[str, Any] = {"content": content} if content else {}
    if reasoning:
        delta["reasoning_content"] = delta["reasoning"] = reasoning
    return delta


def _logprobs(
    body: _Request, ids: Sequence[int], texts: Sequence[bytes], logprobs: Sequence[float]
) -> Json | None:
    if not body.logprobs:
        return None
    by_id = bool(body.return_tokens_as_token_ids)
    content = token_logprobs(ids, logprobs) if by_id else text_logprobs(texts, logprobs)
    return {"content": content, "refusal": None}


def _finish_reason(turn: Turn) -> str:
    if turn.tool_calls and turn.finish_reason == "stop":
        return "tool_calls"
    return turn.finish_reason or ""


def _usage(turn: Turn) -> Json:
    sampled = len(turn.token_ids)
    return {
        "prompt_tokens": turn.num_prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": turn.num_prompt_tokens + sampled,
    }


_HEADER = "Calling tools:\n"
_MAX_CHARACTERS = 1 << 18
_MALFORMED = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


class _EchoedFunction(TypedDict):
    name: str
    arguments: dict[str, Any] | str | None


class _Call(TypedDict):
    id: str
    function: _EchoedFunction


_CALLS = TypeAdapter(list[_Call])


def with_calls(message: dict[str, Any]) -> dict[str, Any]:
    """An assistant message with the calls in its text as calls; any other one as it is."""
    if message["role"] != "assistant" or message.get("tool_calls"):
        return message
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [part["text"] for part in content]
    text, header, listed = "".join(parts).rpartition(_HEADER)
    is_own_line = not text or text.endswith("\n")
    if not (header and is_own_line and listed.startswith("[") and len(listed) <= _MAX_CHARACTERS):
        return message
    try:
        calls = _CALLS.validate_python(ast.literal_eval(listed))
    except (ValidationError, *_MALFORMED):
        return message
    return {**message, "content": text.strip(), "tool_calls": calls} if calls else message
