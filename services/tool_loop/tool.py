"""What the tool loop calls a tool: a schema for the policy, and a call that answers with text."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any


class ToolError(Exception):
    """A call that failed; the policy reads its text and may try again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool of one episode."""

    name: str
    """Unique in the episode."""
    description: str
    """What it does, for the policy."""
    parameters: Mapping[str, Any]
    """JSON Schema of its arguments, an object."""
    origin: str
    """The setting that it comes from, for people."""
    call: Callable[[Mapping[str, Any]], Awaitable[str]]
    """Answers with a text; raises `ToolError`, or `EnvironmentFailed` where no answer exists
    through no fault of the policy."""

    def schema(self) -> dict[str, Any]:
        """In the form of OpenAI's chat API."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}
