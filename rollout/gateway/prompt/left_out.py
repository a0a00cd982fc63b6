"""What a chat template leaves out: found by rendering, refused by name.

Several first system messages are one where the template wants that; none is left out.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Set
from dataclasses import replace
from itertools import takewhile

from rollout.gateway.prompt.conversation import Conversation
from services.chassis.errors import invalid_argument

Render = Callable[[Conversation], str]
"""`ChatTemplate.render`."""

_MARKS = (f"first-{uuid.uuid4().hex}", f"second-{uuid.uuid4().hex}")
_CALL_ID = "000000000"  # Mistral's templates accept no other length
_CURE = "write them into the text of messages, or serve a model whose template renders them"


def joins_system_messages(render: Render) -> bool:
    """Whether the template does not render two system messages at the start."""
    given = [{"role": "system", "content": mark} for mark in _MARKS]
    try:
        text = render(Conversation([*given, {"role": "user", "content": "?"}]))
    except ValueError:
        return True
    return not all(mark in text for mark in _MARKS)


def parts_left_out(render: Render) -> Set[str]:
    """Which of "tools", "tool_calls", "tool" (their results) the template does not write."""
    name, value, result = "lookup", *_MARKS
    schema = {"type": "object", "properties": {"value": {"type": "string"}}}
    tool = {"name": name, "description": value, "parameters": schema}
    call = {"id": _CALL_ID, "type": "function"}
    call["function"] = {"name": name, "arguments": {"value": value}}  # type: ignore[assignment]
    asked = {"role": "user", "content": "?"}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    told = {"role": "tool", "tool_call_id": _CALL_ID, "name": name, "content": result}
    tools = [{"type": "function", "function": tool}]
    shown = _text(render, Conversation([asked], tools), "refused")
    has_tools = shown != _text(render, Conversation([asked]), "")
    plain = _text(render, Conversation([asked, answer, told]), value + result)
    found = {"tools": has_tools, "tool_calls": value in plain, "tool": result in plain}
    return {part for part, is_shown in found.items() if not is_shown}


def check_parts(left_out: Set[str], conversation: Conversation) -> None:
    """Raises `ServiceError`: INVALID_ARGUMENT, the conversation has parts that are left out."""
    if conversation.tools and "tools" in left_out:
        cure = f"the model's chat template does not render tools: {_CURE}"
        raise invalid_argument("messages.tools", f"{len(conversation.tools)} tools", cure)
    for index, message in enumerate(conversation.messages):
        path = f"messages.messages[{index}]"
        if message.get("tool_calls") and "tool_calls" in left_out:
            cure = f"the model's chat template does not render tool calls: {_CURE}"
            raise invalid_argument(
                f"{path}.tool_calls", f"{len(message['tool_calls'])} calls", cure
            )
        if message["role"] == "tool" and "tool" in left_out:
            cure = f"the model's chat template does not render results of tools: {_CURE}"
            raise invalid_argument(f"{path}.role", "tool", cure)


def _text(render: Render, conversation: Conversation, otherwise: str) -> str:
    """The text; `otherwise` where the template refuses it: then it does not leave it out."""
    try:
        return render(conversation)
    except ValueError:
        return otherwise


def with_joined_system(conversation: Conversation) -> Conversation:
    """The conversation with its first system messages as one, an empty line between them."""
    number = _num_leading(conversation)
    if number < 2:
        return conversation
    leading, rest = conversation.messages[:number], conversation.messages[number:]
    content = "\n\n".join(message["content"] for message in leading)
    return replace(conversation, messages=[{**leading[0], "content": content}, *rest])


def check_system_messages(render: Render, conversation: Conversation) -> None:
    """Raises ValueError: the template cannot render a system message, or leaves it out."""
    later = conversation.messages[_num_leading(conversation) :]
    contents = [m["content"].strip() for m in later if m["role"] == "system"]
    if not contents:
        return
    cure = "send it as a user message, or at the start of the conversation"
    try:
        text = render(conversation)
    except ValueError as error:
        shown = f"the system message {contents[0][:40]!r} is not the first one"
        raise ValueError(f"{error} ({shown}: {cure})") from error
    for content in contents:
        if content not in text:
            shown = f"the chat template leaves out the system message {content[:40]!r}"
            raise ValueError(f"{shown}, which is not the first one: {cure}")


def _num_leading(conversation: Conversation) -> int:
    return len([*takewhile(lambda m: m["role"] == "system", conversation.messages)])
