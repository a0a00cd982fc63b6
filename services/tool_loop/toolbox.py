"""The tools of one episode: those of Python functions and of MCP servers, by name."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from seamflow.client.plain_values import to_json_value

from services.tool_loop.user_function import call_function

_TITLES = ("Args", "Arguments", "Parameters", "Returns", "Raises", "Yields", "Example", "Examples")
_SECTION = re.compile(rf"^\s*({'|'.join(_TITLES)}):", re.M)
_PARAMETER = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.+)$")


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


def python_tool(function: Any, origin: str, timeout: float) -> Tool:
    """The tool of a function, sync or async; `origin` is the setting that names it.

    Raises:
        ValueError: it is no function, or its parameters cannot be given by name as JSON.
    """
    if not callable(function) or inspect.isclass(function):
        raise ValueError(f"{origin} is {function!r}: give a function")
    summary, described = _documentation(function)
    arguments = _arguments_model(function, origin, described)
    name = function.__name__

    async def call(given: Mapping[str, Any]) -> str:
        values = _validated(name, arguments, given)
        try:
            async with asyncio.timeout(timeout) as limit:
                return _text(await call_function(function, **values))
        except Exception as error:
            if limit.expired():
                raise ToolError(f"tool {name} gave no answer within {timeout:g} s") from error
            raise ToolError(f"tool {name} raised {error!r}") from error

    schema = arguments.model_json_schema()
    parameters = {key: value for key, value in schema.items() if key != "title"}
    return Tool(name=name, description=summary, parameters=parameters, origin=origin, call=call)


def _arguments_model(
    function: Callable[..., Any], origin: str, described: Mapping[str, str]
) -> type[BaseModel]:
    """A model with a field for each parameter."""
    fields: dict[str, Any] = {}
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(
                f"{origin}: parameter {parameter!s} cannot be given by name; give "
                f"{function.__name__} named parameters only"
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        given = Field(default, alias=name, description=described.get(name))
        # Of pydantic's own names, and of those with an underscore, no field can be made.
        fields[f"argument_{len(fields)}"] = (hints.get(name, Any), given)
    try:
        return create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
    except Exception as error:  # whatever pydantic finds wrong with a type
        raise ValueError(
            f"{origin}: the annotations of {function.__name__} have no JSON Schema: {error}"
        ) from error


def _validated(name: str, model: type[BaseModel], given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = model.model_validate(dict(given))
    except ValidationError as error:
        mistakes = "; ".join(
            f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()
        )
        known = ", ".join(str(each.alias) for each in model.model_fields.values()) or "none"
        raise ToolError(
            f"arguments of tool {name} are wrong: {mistakes}. Its arguments are: {known}"
        ) from error
    return {str(each.alias): getattr(found, name) for name, each in model.model_fields.items()}


def _documentation(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Text before the sections of the docstring, and the texts of its parameters."""
    text = inspect.getdoc(function) or ""
    sections = _SECTION.split(text)
    described = {}
    for title, content in zip(sections[1::2], sections[2::2], strict=True):
        if title in _TITLES[:3]:
            lines = (_PARAMETER.match(line) for line in content.splitlines())
            described = {match[1]: match[2].strip() for match in lines if match}
    return sections[0].strip(), described


def _text(result: Any) -> str:
    if isinstance(result, str):
        return result
    return (
        "" if result is None else json.dumps(to_json_value(result), ensure_ascii=False, default=str)
    )
