"""Conversations: messages, tools and template arguments in the form that chat templates take.

Messages are matched by keys. The key of a message is a digest of its canonical form, so that an
answer which an agent parsed, stored and sent back still has the key of the recorded one: ids of
tool calls, the order and the encoding of arguments, white space around an answer, and whether it
came as one message or in parts, do not count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seamflow.rollout.v1 import rollout_service_pb2 as pb

from services.chassis.errors import invalid_argument
from services.lib.rendering.renderer import reserved_names

TemplateMessage = Mapping[str, Any]
"""role, content, and where given reasoning_content, tool_calls, tool_call_id, name."""

_ROLES = ("system", "user", "assistant", "tool")
_MAX_TOOL_NAME = 128


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template renders."""

    messages: Sequence[TemplateMessage]
    tools: Sequence[Mapping[str, Any]] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    prompt_end: str | None = None
    """What the template writes after the last message; None: not rendered yet."""
    num_before: int = 0
    """Tells conversations apart whose first messages are not among `messages`."""

    def with_messages(self, messages: Sequence[TemplateMessage]) -> Conversation:
        """The same tools and arguments with other messages."""
        return Conversation(messages, self.tools, self.arguments)

    @property
    def answer_ends(self) -> list[int]:
        """Position after each assistant message."""
        return [i + 1 for i, m in enumerate(self.messages) if m["role"] == "assistant"]


def parse_conversation(given: pb.Messages) -> Conversation:
    """Check and convert the messages of a request; their number and size are checked before.

    Raises:
        ServiceError: INVALID_ARGUMENT that names the field.
    """
    path = "messages.messages"
    messages = [_message(f"{path}[{i}]", message) for i, message in enumerate(given.messages)]
    tools = [_tool(f"messages.tools[{i}]", tool) for i, tool in enumerate(given.tools)]
    field_name = "messages.template_arguments_json"
    arguments = _json_object(field_name, given.template_arguments_json)
    if arguments and (reserved := sorted(arguments.keys() & reserved_names())):
        cure = "is none of the template's own variables: leave it out"
        raise invalid_argument(field_name, reserved[0], cure)
    return Conversation(_merge_split_answers(messages), tools, arguments)


def split_prefill(given: pb.Messages) -> tuple[pb.Messages, str]:
    """The messages before a last one of the assistant, and the text of that: an answer begins so.

    Raises:
        ServiceError: INVALID_ARGUMENT, no answer can begin so.
    """
    if not given.messages or given.messages[-1].role != "assistant":
        return given, ""
    before, last = pb.Messages(), given.messages[-1]
    before.CopyFrom(given)
    del before.messages[-1]
    path = f"messages.messages[{len(before.messages)}]"
    content = _content(path, last)
    if last.reasoning or last.tool_calls or not content:
        cure = "the last message may be the assistant's only if it has text alone, to be continued"
        raise invalid_argument(path, "an answer", f"{cure}: send what follows it, or leave it out")
    if content != content.rstrip():
        cure = "ends with white space, which is part of the next token: leave that out"
        raise invalid_argument(f"{path}.content", content[-40:], cure)
    if not before.messages or before.messages[-1].role == "assistant":
        cure = "send a message of another role before it"
        raise invalid_argument(path, "an answer", cure)
    return before, content


def answer_message(message: TemplateMessage) -> pb.Message:
    """The contract's form of an answer."""
    answer = pb.Message(role="assistant", reasoning=message.get("reasoning_content") or "")
    if message["content"]:
        answer.content.add(type="text", text=message["content"])
    for call in message.get("tool_calls", ()):
        function = call["function"]
        answer.tool_calls.add(
            id=call.get("id", ""),
            name=function["name"],
            arguments_json=json.dumps(function["arguments"], ensure_ascii=False),
        )
    return answer


def message_keys(messages: Sequence[TemplateMessage]) -> list[str]:
    return [message_key(message) for message in messages]


def message_key(message: TemplateMessage) -> str:
    """Digest of role, content, tool calls and name; then ":" and that of the reasoning, if any."""
    is_answer = message["role"] == "assistant"
    calls = [
        [call["function"]["name"], _canonical(call["function"]["arguments"])]
        for call in message.get("tool_calls", ())
    ]
    content = message["content"].strip() if is_answer else message["content"]
    name = "" if is_answer else message.get("name", "")  # some clients name the answers
    key = _digest([message["role"], content, calls, name])
    reasoning = (message.get("reasoning_content") or "").strip()
    return f"{key}:{_digest(reasoning)}" if reasoning else key


def _canonical(arguments: Any) -> Any:
    """`arguments` with whole numbers as integers: JavaScript writes 1.0 as 1."""
    return json.loads(json.dumps(arguments), parse_float=_number)


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() else value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def _message(path: str, given: pb.Message) -> dict[str, Any]:
    if given.role not in _ROLES:
        raise invalid_argument(f"{path}.role", given.role, f"must be one of {_ROLES}")
    message: dict[str, Any] = {"role": given.role, "content": _content(path, given)}
    if given.role == "assistant":
        if given.reasoning:
            message["reasoning_content"] = given.reasoning
        if given.tool_calls:
            message["tool_calls"] = [
                _tool_call(f"{path}.tool_calls[{i}]", call)
                for i, call in enumerate(given.tool_calls)
            ]
    elif given.reasoning or given.tool_calls:
        name = "reasoning" if given.reasoning else "tool_calls"
        raise invalid_argument(f"{path}.{name}", given.role, "only assistant messages may have it")
    if given.tool_call_id:
        message["tool_call_id"] = given.tool_call_id
    if given.name:
        message["name"] = given.name
    return message


def _content(path: str, given: pb.Message) -> str:
    for i, part in enumerate(given.content):
        if part.type != "text":
            cure = 'only "text" parts are supported'
            raise invalid_argument(f"{path}.content[{i}].type", part.type, cure)
    return "".join(part.text for part in given.content)


def _tool_call(path: str, given: pb.ToolCall) -> dict[str, Any]:
    if not given.name:
        raise invalid_argument(f"{path}.name", given.name, "must not be empty")
    arguments = _arguments(f"{path}.arguments_json", given.arguments_json)
    call = {"type": "function", "function": {"name": given.name, "arguments": arguments}}
    return {"id": given.id, **call} if given.id else call


def _tool(path: str, given: pb.Tool) -> dict[str, Any]:
    if not 1 <= len(given.name) <= _MAX_TOOL_NAME:
        cure = f"must have 1 to {_MAX_TOOL_NAME} characters"
        raise invalid_argument(f"{path}.name", given.name, cure)
    function: dict[str, Any] = {"name": given.name, "description": given.description}
    if given.parameters_json:
        schema = _json_object(f"{path}.parameters_json", given.parameters_json)
        function["parameters"] = schema
    return {"type": "function", "function": function}


def _arguments(path: str, text: str) -> dict[str, Any]:
    """Arguments of a call; some clients send an object as a JSON string, or null for none."""
    try:
        value = json.loads(text or "{}")
        text = value if isinstance(value, str) else "{}" if value is None else text
    except (ValueError, RecursionError):
        pass  # refused below
    return _json_object(path, text)


def _json_object(path: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise invalid_argument(path, text[:40], "must be a JSON object")
    return value


def _merge_split_answers(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One message where a client sent the parts of an answer as several.

    Their order is reasoning, text, tool calls; tool calls may come one by one, and parts may be
    empty.
    """
    merged: list[dict[str, Any]] = []
    for message in messages:
        if merged and _is_rest(merged[-1], message):
            last = merged[-1]
            merged[-1] = {**last, **message, "content": last["content"] or message["content"]}
            if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
                merged[-1]["tool_calls"] = calls
        else:
            merged.append(message)
    return merged


def _is_rest(last: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Whether an assistant message has only what may follow that of the one before."""
    if not last["role"] == message["role"] == "assistant" or "reasoning_content" in message:
        return False
    if message["content"]:
        return set(last) == {"role", "content", "reasoning_content"} and not last["content"]
    return True
