"""A Python function as a tool: JSON Schema from its annotations and docstring."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from seamflow.client.plain_values import to_json_value

from services.tool_loop.toolbox import Tool, ToolError
from services.tool_loop.user_function import call_function

_TITLES = ("Args", "Arguments", "Parameters", "Returns", "Raises", "Yields", "Example", "Examples")
_SECTION = re.compile(rf"^\s*({'|'.join(_TITLES)}):", re.M)
_PARAMETER = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.+)$")


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
