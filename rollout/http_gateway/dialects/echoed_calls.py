"""Tool calls that a client sends back as text, read as the calls that they were.

smolagents writes them into the content of its history: "Calling tools:\\n[{'id': …}]", a list in
Python's syntax. As text they would be an answer that nobody has given, and the prompt would not
continue the recorded tokens.
"""

from __future__ import annotations

import ast
from typing import Any

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

_HEADER = "Calling tools:\n"
_MAX_CHARACTERS = 1 << 18
_MALFORMED = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


class _Function(TypedDict):
    name: str
    arguments: dict[str, Any] | str | None


class _Call(TypedDict):
    id: str
    function: _Function


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
