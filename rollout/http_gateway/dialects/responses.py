"""POST /v1/responses: the subset of OpenAI's Responses that needs no state on the server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from rollout.http_gateway.api_error import ApiError, invalid
from rollout.http_gateway.dialects.dialect import (
    Dialect,
    EventStream,
    Json,
    TurnRequest,
    seamflow_fields,
)
from rollout.http_gateway.dialects.request_model import (
    AnswerFormat,
    Budget,
    OpenAIChoice,
    RequestPart,
    SamplingRequest,
    TextPart,
    openai_choice,
    required,
    schema_of,
    text_of,
)
from rollout.http_gateway.dialects.response_events import ResponseEvents, output_items

if TYPE_CHECKING:
    from seamflow.client import Turn

_LOGPROBS = "message.output_text.logprobs"
"""What `include` may ask for; what else it names is of items that replies do not have here."""
_RECORDED = {"msg": "content", "rs": "reasoning"}


class _Item(RequestPart):
    type: str = "message"
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[TextPart] | None = None


class _Tool(RequestPart):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Text(RequestPart):
    format: AnswerFormat | None = None


class _Request(SamplingRequest):
    IGNORED: ClassVar = frozenset(
        {
            "client_metadata",
            "max_tool_calls",
            "metadata",
            "prompt_cache_key",
            "prompt_cache_retention",
            "reasoning",
            "safety_identifier",
            "service_tier",
            "stream_options",
            "truncation",
            "user",
        }
    )
    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "background": (False,),
        "top_logprobs": (0,),
    }

    model: str = ""
    input: str | list[_Item] = Field(min_length=1)
    include: list[str] | None = None
    instructions: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: OpenAIChoice = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    store: bool | None = None
    max_output_tokens: Budget | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Responses(Dialect):
    NAMES: ClassVar[Mapping[str, str]] = {
        "response_schema_json": "text.format",
        "tool_choice.one_call": "parallel_tool_calls",
        "messages.after_turn_id": "previous_response_id",
        "ended turn": "a response or item of turn",
    }

    def parse(self, body: bytes) -> TurnRequest:
        request = _Request.read(body)
        tools = request.tools or []
        choice = openai_choice(request.tool_choice, [tool.name for tool in tools])
        text = request.text or _Text()
        return TurnRequest(
            body=request,
            messages=_messages(request),
            tools=[tool.model_dump(exclude_none=True) for tool in tools],
            tool_choice=choice,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            response_schema=schema_of("text.format", text.format),
            after_turn_id=(request.previous_response_id or "").removeprefix("resp_"),
            template_arguments=request.chat_template_kwargs or {},
            sampling=request.sampling(request.max_output_tokens),
            stream=bool(request.stream),
            return_token_bytes=_LOGPROBS in (request.include or ()),
        )

    def reply(self, request: TurnRequest, turn: Turn) -> Json:
        head = _head(request.body, turn.turn_id)
        return {**head, **_outcome(turn)}

    def events(self, request: TurnRequest, turn_id: str) -> EventStream:
        return ResponseEvents(_head(request.body, turn_id), _outcome)


def _messages(request: _Request) -> list[Json]:
    """The input as messages of chat completions; parts of one answer become one message."""
    items = request.input
    if isinstance(items, str):
        items = [_Item(role="user", content=items)]
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    for index, item in enumerate(items):
        message = _message(f"input[{index}]", item)
        if messages and _belongs(messages[-1], message):
            _join(messages[-1], message)
        else:
            messages.append(message)
    return messages


def _message(path: str, item: _Item) -> dict[str, Any]:
    if item.type == "message":
        given = required(f"{path}.role", item.role)
        role = "system" if given == "developer" else given
        return {"role": role, "content": text_of(f"{path}.content", item.content)}
    if item.type == "reasoning":
        text = text_of(f"{path}.content", item.content)
        return {"role": "assistant", "reasoning_content": text}
    if item.type == "function_call":
        name = required(f"{path}.name", item.name)
        function = {"name": name, "arguments": item.arguments or ""}
        return {"role": "assistant", "tool_calls": [{"id": item.call_id, "function": function}]}
    if item.type == "function_call_output":
        text = text_of(f"{path}.output", item.output)
        call_id = required(f"{path}.call_id", item.call_id)
        return {"role": "tool", "tool_call_id": call_id, "content": text}
    if item.type == "item_reference":
        return _referenced(f"{path}.id", required(f"{path}.id", item.id))
    raise invalid(
        f"{path}.type",
        f"{path}.type is {item.type[:80]!r}: only message, reasoning, function_call, "
        "function_call_output and item_reference are supported",
        "unsupported_value",
    )


def _referenced(path: str, item_id: str) -> dict[str, Any]:
    """The part of a recorded answer that an item of a reply has been."""
    kind, _, turn_id = item_id.partition("_")
    recorded: dict[str, Any] = {}
    if kind == "fc":
        turn_id, _, index = turn_id.rpartition("_")
        recorded = {"tool_calls": [int(index)]} if index.isdecimal() and len(index) < 5 else {}
    elif kind in _RECORDED:
        recorded = {_RECORDED[kind]: True}
    if not (recorded and turn_id):
        message = f"{path} is {item_id[:80]!r}: there is no such item; take the id of an output"
        raise ApiError(404, message, path, "not_found")
    return {"role": "assistant", "recorded": {"turn_id": turn_id, **recorded}}


def _belongs(answer: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two assistant messages are parts of one answer."""
    named = [m["recorded"]["turn_id"] for m in (answer, other) if "recorded" in m]
    return answer["role"] == other["role"] == "assistant" and len({*named}) < 2


def _join(answer: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key in ("content", "reasoning_content"):
        if key in other:
            answer[key] = answer.get(key, "") + other[key]
    if "recorded" in other:
        before, more = answer.get("recorded", {}), other["recorded"]
        calls = [*before.get("tool_calls", ()), *more.get("tool_calls", ())]
        answer["recorded"] = {**before, **more, "tool_calls": calls}
    if "tool_calls" in other:
        answer["tool_calls"] = [*answer.get("tool_calls", ()), *other["tool_calls"]]


def _head(body: _Request, turn_id: str) -> dict[str, Any]:
    """The response object before its answer."""
    return {
        "id": f"resp_{turn_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": _shown_format(body)},
        "tool_choice": _shown_choice(body),
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _shown_format(body: _Request) -> Json:
    given = body.text.format if body.text is not None else None
    if given is None:
        return {"type": "text"}
    schema = {"name": "answer", "schema": given.schema_} if given.schema_ is not None else {}
    return {"type": given.type, **schema}


def _shown_choice(body: _Request) -> str | Json:
    choice = openai_choice(body.tool_choice, [tool.name for tool in body.tools or ()])
    return choice if isinstance(choice, str) else {"type": "function", **choice}


def _outcome(turn: Turn) -> dict[str, Any]:
    """The fields that the turn's end sets."""
    is_cut = turn.finish_reason == "length"
    sampled = len(turn.token_ids)
    return {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output_items(turn),
        "usage": {
            "input_tokens": turn.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turn.num_prompt_tokens + sampled,
        },
        "seamflow": seamflow_fields(turn),
    }
