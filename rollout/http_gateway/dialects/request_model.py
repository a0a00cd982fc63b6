"""Base of the requests of all dialects: checked by pydantic, with errors that name the parameter.

A parameter that changes nothing here is accepted, one that would change the answer and is not
supported is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from seamflow.common.v1.tokens_pb2 import SamplingParams

from rollout.http_gateway.api_error import ApiError, invalid

_MAX_SHOWN = 80
_KINDS = ("str", "int", "float", "bool")
_TEXT = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
_T = TypeVar("_T")


def _refuse(value: object) -> None:
    if value:
        raise ValueError("only text is supported here: leave it out, or write it into the content")


NotText = Annotated[None, BeforeValidator(_refuse)]
"""Of a key whose content would be lost: null, false and empty are accepted."""


class RequestPart(BaseModel):
    """A part of a request. Keys that it does not know are ignored: clients send replies back."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)


class RequestModel(BaseModel):
    """A request. Unknown parameters are refused unless they are null or harmless."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)

    IGNORED: ClassVar[frozenset[str]] = frozenset()
    """Parameters that change no answer."""
    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Parameters that are accepted with these values only."""

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Read a body. Raises `ApiError`, status 400."""
        try:
            values = from_json(body, allow_inf_nan=False)
        except ValueError as error:
            message = f"the body is not JSON: {error}"
            raise ApiError(400, message, code="invalid_json") from error
        if not isinstance(values, dict):
            raise ApiError(400, "the body must be a JSON object", code="invalid_json")
        return cls.check(values)

    @classmethod
    def check(cls, values: Mapping[str, Any], path: str = "") -> Self:
        """Read decoded values, which errors name below `path`. Raises `ApiError`, status 400."""
        try:
            request = cls.model_validate(values)
        except ValidationError as error:
            raise _explained(error, path) from error
        request._check_others(path)
        return request

    def _check_others(self, path: str) -> None:
        for name, value in (self.model_extra or {}).items():
            if value is None or name in self.IGNORED:
                continue
            full = path + name[:_MAX_SHOWN]
            if name not in self.NEUTRAL:
                message = f"parameter {_shown(full)} is not supported: leave it out"
                raise invalid(full, message, "unsupported_parameter")
            if value not in self.NEUTRAL[name]:
                allowed = " or ".join(json.dumps(each) for each in self.NEUTRAL[name])
                message = f"{full} is {_shown(value)}: only {allowed} is supported, or leave it out"
                raise invalid(full, message, "unsupported_value")


class TextPart(RequestPart):
    type: str
    text: str = ""


def text_of(path: str, content: str | Sequence[TextPart] | None) -> str:
    """The text of the content at `path`. Raises `ApiError`: a part is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    for index, part in enumerate(content):
        check_is_text(f"{path}[{index}].type", part.type)
    return "".join(part.text for part in content)


def check_is_text(path: str, kind: str) -> None:
    """Raises `ApiError`: a part of content with the type `kind` at `path` is no text."""
    if kind not in _TEXT:
        message = f"{path} is {kind[:_MAX_SHOWN]!r}: only text is supported here"
        raise invalid(path, message, "unsupported_value")


def required(path: str, value: _T | None) -> _T:
    """The parameter at `path`. Raises `ApiError`: it is missing."""
    if value is None:
        raise invalid(path, f"{path} is missing", "missing_required_parameter")
    return value


def _explained(error: ValidationError, path: str) -> ApiError:
    """The deepest mistake, named as the client wrote it."""
    first = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))
    # A union reports each kind of value that it tried, and adds its name.
    path = path.rstrip(".")
    for part in first["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in _KINDS:
            path += f".{part}" if path else part
    if first["type"] == "missing":
        return invalid(path, f"{path} is missing", "missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    return invalid(path, f"{path} is {_shown(first['input'])}: {message[:1].lower()}{message[1:]}")


def _shown(value: object) -> str:
    text = json.dumps(value, default=str, ensure_ascii=True)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"


_MAX_INT32 = 2**31 - 1

Budget = Annotated[int, Field(ge=1, le=_MAX_INT32)]
"""Tokens to sample at most."""
TokenId = Annotated[int, Field(ge=0, le=_MAX_INT32)]
StopStrings = str | list[str] | None


class SamplingRequest(RequestModel):
    """The parameters of OpenAI's API and vLLM's that this system has."""

    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MAX_INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopStrings = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None

    def sampling(self, budget: int | None) -> SamplingParams:
        """The contract's form; `budget` None: the gateway's default."""
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "min_p", "seed")}
        if self.top_k is not None:
            given["top_k"] = max(self.top_k, 0)  # vLLM writes "off" as -1
        params = SamplingParams(
            **{name: value for name, value in given.items() if value is not None},
            stop=_strings(self.stop),
            stop_token_ids=self.stop_token_ids or (),
        )
        if budget is not None:
            params.max_new_tokens = budget
        if self.ignore_eos is not None:
            params.ignore_eos = self.ignore_eos
        return params


def _strings(stop: StopStrings) -> list[str]:
    if stop is None:
        return []
    return [stop] if isinstance(stop, str) else stop


ANY_OBJECT = {"type": "object"}


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
    return required(f"{path}.schema", schema)


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
