"""JSON Schemas of answers: which bracket opens one, and whether it is valid.

Schemas come from agents. So regular expressions are not tried, references are counted and only
looked up in the schema itself: none can keep the gateway busy, or make it read from the network.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import referencing
from jsonschema.protocols import Validator
from jsonschema.validators import Draft202012Validator, extend, validator_for
from referencing.exceptions import Unresolvable
from seamflow.rollout.v1 import rollout_service_pb2 as pb

_MAX_REFERENCES = 10_000
_MAX_DEPTH = 32
_MAX_REASON = 400
_BRACKETS = {"object": "{", "array": "["}
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_NO_JSON = (ValueError, RecursionError)

Keyword = Callable[[Any, Any, Any, Any], Iterator[Any] | None]


class JsonSchema:
    """One schema, of the draft that its "$schema" names, else 2020-12."""

    def __init__(self, text: str) -> None:
        """Raises ValueError: it is no JSON Schema with an object or an array at its root."""
        self._schema = _object(text)
        self._kind = validator_for(self._schema, default=Draft202012Validator)
        try:
            self._kind.check_schema(self._schema)
        except (jsonschema.SchemaError, RecursionError) as error:
            raise ValueError(f"it is no JSON Schema: {_line(error)}") from error
        kind = _root_kind(self._schema, self._schema, _MAX_DEPTH)
        if kind is None:
            cure = "wrap other values in an object with one property"
            raise ValueError(f"its root must be an object or an array: {cure}")
        self.bracket = _BRACKETS[kind]
        """What a value begins with."""
        self._has_pattern = '"pattern"' in text
        self._has_pattern_properties = '"patternProperties"' in text

    def check(self, content: str) -> pb.AnswerCheck:
        """Whether an answer's content is a value of the schema."""
        try:
            value = json.loads(content, parse_constant=_refuse_constant)
        except _NO_JSON as error:
            return check_of(pb.CHECK_RESULT_INVALID, f"the content is no JSON: {_line(error)}")
        if self._has_pattern_properties:
            return check_of(pb.CHECK_RESULT_UNCHECKED, "patternProperties are not checked")
        try:
            wrong = next(self._validator().iter_errors(value), None)
        except (Unresolvable, _TooManyError, RecursionError) as error:
            return check_of(pb.CHECK_RESULT_UNCHECKED, f"the schema's $ref: {_line(error)}")
        if wrong is not None:
            return check_of(pb.CHECK_RESULT_INVALID, f"{wrong.json_path}: {_line(wrong)}")
        if self._has_pattern:
            return check_of(pb.CHECK_RESULT_UNCHECKED, "all but each pattern is valid")
        return check_of(pb.CHECK_RESULT_VALID)

    def _validator(self) -> Validator:
        """For one value: it counts the references that it follows."""
        known = self._kind.VALIDATORS
        left = iter(range(_MAX_REFERENCES))
        counted = {name: _counted(known[name], left) for name in _REFERENCES if name in known}
        kind = extend(self._kind, {**counted, "pattern": _ignore})
        validator: Validator = kind(self._schema, registry=referencing.Registry())
        return validator


def check_of(result: pb.CheckResult.ValueType, reason: str = "") -> pb.AnswerCheck:
    return pb.AnswerCheck(result=result, reason=reason[:_MAX_REASON])


class _TooManyError(Exception):
    """A value would take too many references to check."""


def _counted(keyword: Keyword, left: Iterator[int]) -> Keyword:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if next(left, None) is None:
            raise _TooManyError(f"more than {_MAX_REFERENCES} were followed")
        yield from keyword(validator, value, instance, schema) or ()

    return check


def _ignore(validator: Any, value: Any, instance: Any, schema: Any) -> None:
    """A keyword that is not checked."""


def _object(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except _NO_JSON as error:
        raise ValueError(f"it is no JSON: {_line(error)}") from error
    if not isinstance(schema, dict):
        raise ValueError("it must be a JSON object")  # noqa: TRY004, the type is a client's value
    return schema


def _root_kind(schema: Any, root: dict[str, Any], depth: int) -> str | None:
    """ "object" or "array", which every value of the schema is; None: others may be, too."""
    if not isinstance(schema, dict) or depth == 0:
        return None
    if "type" in schema:
        return schema["type"] if schema["type"] in ("object", "array") else None
    if isinstance(schema.get("$ref"), str):
        return _root_kind(_resolved(schema["$ref"], root), root, depth - 1)
    for name in ("anyOf", "oneOf"):
        if kinds := {_root_kind(each, root, depth - 1) for each in schema.get(name, ())}:
            return kinds.pop() if len(kinds) == 1 else None
    of_all = [_root_kind(each, root, depth - 1) for each in schema.get("allOf", ())]
    implied = "object" if "properties" in schema else None
    return next((kind for kind in of_all if kind), implied)


def _resolved(reference: str, root: dict[str, Any]) -> Any:
    """What "#/$defs/Name" names; None if it names nothing."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no value of JSON")


def _line(error: object) -> str:
    return str(error).partition("\n")[0][:_MAX_REASON]
