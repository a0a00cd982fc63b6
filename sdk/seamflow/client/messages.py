"""Messages and tools: dicts in the form of OpenAI's chat API, to and from the contract's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from seamflow.client.plain_values import to_json_value, whole_text
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.rollout.v1 import rollout_service_pb2 as rollout_pb

Message = Mapping[str, Any]
"""{"role": "user", "content": "…"}; content may be a list of {"type": "text", "text": "…"};
assistant messages may have "reasoning_content" and "tool_calls", tool messages "tool_call_id".
"recorded": {"turn_id", "content": True, "reasoning": True, "tool_calls": [0]} stands for parts of
the answer of a recorded turn of the rollout."""

Tool = Mapping[str, Any]
"""{"type": "function", "function": {"name", "description", "parameters": <JSON Schema>}}, or only
the inner object."""

ToolChoice = str | Mapping[str, Any]
"""How the answer calls tools: "auto"; "none": what looks like a call is content; "required"; or
{"type": "function", "function": {"name"}}, or only the inner object, for a call of one tool."""


_TEXT = ("text", "input_text", "output_text")
_NOT_TEXT = frozenset(
    {
        *("audio", "audios", "documents", "files", "function_call", "image", "images", "is_error"),
        *("refusal", "video", "videos"),
    }
)
"""Keys of messages, in the APIs of others, whose content would be lost here."""


def to_tool_choice(choice: ToolChoice, *, parallel: bool) -> pb.ToolChoice | None:
    """The contract's form; None: as the policy likes. Not `parallel`: one call ends the answer.

    Raises:
        ValueError: it is none of the known forms.
    """
    one_call = not parallel
    if isinstance(choice, Mapping):
        name = choice.get("function", choice).get("name")
        if not (isinstance(name, str) and name):
            raise ValueError(f'tool_choice is {choice!r}: name a tool with {{"name": …}}')
        return pb.ToolChoice(name=name, one_call=one_call)
    if choice not in ("auto", "none", "required"):
        known = '"auto", "none", "required" or {"name": …}'
        raise ValueError(f"tool_choice is {choice!r}: must be {known}")
    if choice == "none":
        return pb.ToolChoice(none=True)
    if choice == "required":
        return pb.ToolChoice(required=True, one_call=one_call)
    return pb.ToolChoice(one_call=True) if one_call else None


def to_messages(
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    template_arguments: Mapping[str, Any] | None = None,
) -> pb.Messages:
    """The contract's form of a prompt. Halves of characters in texts are replaced.

    Raises:
        ValueError: a message or tool lacks a key, or has content that is no text.
    """
    arguments = _json(template_arguments) if template_arguments else ""
    return pb.Messages(
        messages=[_to_message(i, message) for i, message in enumerate(messages)],
        tools=[_to_tool(i, tool) for i, tool in enumerate(tools)],
        template_arguments_json=arguments,
    )


def from_message(message: pb.Message) -> dict[str, Any]:
    """An answer, ready to be appended to the messages of the next turn."""
    text = "".join(part.text for part in message.content)
    answer: dict[str, Any] = {"role": message.role, "content": text}
    if message.reasoning:
        answer["reasoning_content"] = message.reasoning
    if message.tool_calls:
        answer["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_json},
            }
            for call in message.tool_calls
        ]
    return answer


def _to_message(index: int, message: Message) -> pb.Message:
    if "role" not in message:
        raise ValueError(f'messages[{index}] has no "role"')
    given = pb.Message(
        role=message["role"],
        reasoning=whole_text(message.get("reasoning_content") or message.get("reasoning") or ""),
        tool_call_id=whole_text(message.get("tool_call_id") or ""),
        name=whole_text(message.get("name") or ""),
    )
    if recorded := message.get("recorded"):
        given.recorded.CopyFrom(pb.RecordedAnswer(**recorded))
    for text in _texts(f"messages[{index}]", message):
        given.content.add(type="text", text=whole_text(text))
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        given.tool_calls.add(
            id=whole_text(call.get("id") or ""),
            name=whole_text(function["name"]),
            arguments_json=_json(function.get("arguments")),
        )
    return given


def _texts(path: str, message: Message) -> list[str]:
    """Texts of its content. Raises ValueError: a part or key of it is no text."""
    for key in sorted(_NOT_TEXT & message.keys()):
        if message[key]:
            raise ValueError(f"{path}.{key} is not supported: put its text into the content")
    content = message.get("content") or ()
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in _TEXT or not isinstance(part.get("text"), str):
            raise ValueError(
                f"{path}.content[{number}] is of type {kind!r}: only text parts, "
                '{"type": "text", "text": …}, are supported; describe it in a text'
            )
    return [part["text"] for part in parts if part["text"]]


def _to_tool(index: int, tool: Tool) -> pb.Tool:
    function = tool.get("function", tool)
    if "name" not in function:
        raise ValueError(f'tools[{index}] has no function "name"')
    return pb.Tool(
        name=whole_text(function["name"]),
        description=whole_text(function.get("description") or ""),
        parameters_json=_json(function.get("parameters")),
    )


def _json(value: Any) -> str:
    if value is None:
        return ""
    return whole_text(value) if isinstance(value, str) else json.dumps(to_json_value(value))


def to_dict(message: rollout_pb.Message) -> dict[str, Any]:
    """A message of any role."""
    given = from_message(message)
    if message.tool_call_id:
        given["tool_call_id"] = message.tool_call_id
    if message.name:
        given["name"] = message.name
    return given


def tool_dict(tool: rollout_pb.Tool) -> dict[str, Any]:
    """A tool."""
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    if tool.parameters_json:
        function["parameters"] = json.loads(tool.parameters_json)
    return {"type": "function", "function": function}
