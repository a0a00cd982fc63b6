"""The tools of one episode: those of Python functions and of MCP servers, by name."""

from __future__ import annotations

import asyncio
import difflib
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class ToolError(Exception):
    """A call that failed; the policy reads its text and may try again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool of one episode."""

    name: str
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


class Toolbox:
    """Calls tools by name. What the policy does wrong is told to it as the tool's answer."""

    def __init__(self, tools: Iterable[Tool], max_characters: int) -> None:
        """Answers beyond `max_characters` are cut off.

        Raises:
            ValueError: two tools have the same name.
        """
        self._tools: dict[str, Tool] = {}
        self._max_characters = max_characters
        for tool in tools:
            other = self._tools.setdefault(tool.name, tool)
            if other is not tool:
                raise ValueError(
                    f"{other.origin} and {tool.origin} both have a tool {tool.name!r}: rename or "
                    "remove one of them"
                )

    def schemas(self) -> list[dict[str, Any]]:
        """All tools in the form of OpenAI's chat API."""
        return [tool.schema() for tool in self._tools.values()]

    async def answers(self, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages of role "tool", one for each call, in order; the calls run concurrently.

        Raises:
            EnvironmentFailed: an MCP server is lost.
        """
        return await asyncio.gather(*(self._answer(call) for call in calls))

    async def _answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        try:
            text = await self._call(function["name"], function.get("arguments") or "{}")
        except ToolError as error:
            text = f"Error: {error}"
        if len(text) > self._max_characters:
            length = len(text)
            text = f"{text[: self._max_characters]}… (cut off: {length:,} characters)"
        return {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": function["name"],
            "content": text,
        }

    async def _call(self, name: str, arguments: str) -> str:
        tool = self._tools.get(name)
        if tool is None:
            near = difflib.get_close_matches(name, self._tools, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            known = ", ".join(self._tools) or "none"
            raise ToolError(f"there is no tool {name!r}; {hint}the tools are: {known}")
        return await tool.call(_arguments(name, arguments))


def _arguments(name: str, text: str) -> Mapping[str, Any]:
    cure = 'send a JSON object, such as {"argument": "value"}'
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise ToolError(f"arguments of tool {name} are no JSON ({error}): {cure}") from error
    if not isinstance(arguments, dict):
        raise ToolError(f"arguments of tool {name} are no JSON object: {cure}")
    return arguments
