"""Base of the requests of all dialects: checked by pydantic, with errors that name the parameter.

A parameter that changes nothing here is accepted, one that would change the answer and is not
supported is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import from_json

from rollout.http_gateway.api_error import ApiError, invalid

_MAX_SHOWN = 80
_KINDS = ("str", "int", "float", "bool")


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
