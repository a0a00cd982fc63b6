"""What requests demand of an answer, in the forms of the dialects: tool calls and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from rollout.http_gateway.api_error import invalid
from rollout.http_gateway.dialects.request_model import RequestPart

ANY_OBJECT = {"type": "object"}
"""Schema of a JSON object with any content."""


class _Schema(RequestPart):
    schema_: dict[str, Any] = Field(alias="schema")


class AnswerFormat(RequestPart):
    """The format of an answer; Responses and Messages give the schema without `json_schema`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class _Named(RequestPart):
    name: str


class _AllowedTool(RequestPart):
    type: Literal["function"]
    name: str = ""
    function: _Named | None = None


class _Allowed(RequestPart):
    mode: Literal["auto", "required"]
    tools: list[_AllowedTool] = Field(min_length=1)


class NamedChoice(RequestPart):
    """A tool choice with a type; Responses gives names without `function`."""

    type: Literal["function", "allowed_tools"]
    name: str = ""
    function: _Named | None = None
    allowed_tools: _Allowed | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[_AllowedTool] | None = None


OpenAIChoice = Literal["auto", "none", "required", "any"] | NamedChoice | None


def openai_choice(choice: OpenAIChoice, tools: Sequence[str]) -> str | dict[str, str]:
    """ "auto", "none", "required" or {"name": …}; `tools` are the request's.

    Raises:
        ApiError: it names no tool, or allows some of the tools only.
    """
    if choice is None or isinstance(choice, str):
        return {None: "auto", "any": "required"}.get(choice, choice or "auto")
    if choice.type == "allowed_tools":
        return _allowed(choice, tools)
    name = choice.function.name if choice.function is not None else choice.name
    if not name:
        raise invalid("tool_choice", "tool_choice has no name", "missing_required_parameter")
    return {"name": name}


def schema_of(path: str, given: AnswerFormat | None) -> dict[str, Any] | None:
    """The JSON Schema of a format at `path`; None: any text. Raises `ApiError`: it has none."""
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return ANY_OBJECT
    schema = given.json_schema.schema_ if given.json_schema is not None else given.schema_
    if schema is None:
        path = f"{path}.schema"
        raise invalid(path, f"{path} is missing", "missing_required_parameter")
    return schema


def _allowed(choice: NamedChoice, tools: Sequence[str]) -> str | dict[str, str]:
    allowed = choice.allowed_tools
    mode = allowed.mode if allowed is not None else choice.mode or "auto"
    listed = allowed.tools if allowed is not None else choice.tools or []
    names = {t.function.name if t.function is not None else t.name for t in listed}
    if mode == "required" and len(names) == 1:
        return {"name": names.pop()}
    if not set(tools) <= names:
        raise invalid(
            "tool_choice",
            'tool_choice is "allowed_tools" with some of the tools: only all of them, or a single '
            'one with mode "required", is supported; send the allowed ones alone as tools',
            "unsupported_value",
        )
    return mode
