"""System messages: several first ones as one where the template wants that; none is left out."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile

from rollout.gateway.prompt.conversation import Conversation

__all__ = ["check_system_messages", "joins_system_messages", "with_joined_system"]

Render = Callable[[Conversation], str]
"""`ChatTemplate.render`."""

_MARKS = (f"first-{uuid.uuid4().hex}", f"second-{uuid.uuid4().hex}")


def joins_system_messages(render: Render) -> bool:
    """Whether the template does not render two system messages at the start."""
    given = [{"role": "system", "content": mark} for mark in _MARKS]
    try:
        text = render(Conversation([*given, {"role": "user", "content": "?"}]))
    except ValueError:
        return True
    return not all(mark in text for mark in _MARKS)


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
