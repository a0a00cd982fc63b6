"""What the policy reads of the result of an MCP tool."""

from __future__ import annotations

import json
from typing import Any


def result_text(result: Any) -> str:
    """The texts of an MCP result, those of embedded resources too; a note for each other part.

    Args:
        result: a CallToolResult of the package `mcp`, with `content` and `structured_content`. The
            latter is shown as JSON where the content has no text.
    """
    shown = [_note(part) if (text := _text_of(part)) is None else text for part in result.content]
    if result.structured_content is not None and not any(map(_text_of, result.content)):
        shown = [each for each in shown if each]
        shown.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(shown)


def _text_of(part: Any) -> str | None:
    """The text of a part, or of the resource in it; None: it has none."""
    text = getattr(part, "text", None)
    if text is None:
        text = getattr(getattr(part, "resource", None), "text", None)
    return text if isinstance(text, str) else None


def _note(part: Any) -> str:
    if part.type == "resource_link":
        return f"[resource link: {part.name}, {part.uri}]"
    resource = getattr(part, "resource", part)
    facts = [str(getattr(resource, name, None) or "") for name in ("uri", "mime_type")]
    return f"[{part.type}: {', '.join(filter(None, facts)) or 'no text'}, not shown]"
