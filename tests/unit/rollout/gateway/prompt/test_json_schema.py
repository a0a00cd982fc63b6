"""JSON Schemas of answers: their bracket, their verdicts, and schemas that would do harm."""

from __future__ import annotations

import json
from typing import Any

import pytest
from seamflow.rollout.v1 import rollout_service_pb2 as pb

from rollout.gateway.prompt.constraint.constraint import JsonEnd
from rollout.gateway.prompt.constraint.json_schema import JsonSchema

VALID, INVALID = pb.CHECK_RESULT_VALID, pb.CHECK_RESULT_INVALID
UNCHECKED = pb.CHECK_RESULT_UNCHECKED
NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def schema(value: Any) -> JsonSchema:
    return JsonSchema(json.dumps(value))


@pytest.mark.parametrize(
    ("value", "bracket"),
    [
        ({"type": "object"}, "{"),
        ({"type": "array"}, "["),
        ({"properties": {}}, "{"),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"type": "array"}}}, "["),
        ({"$ref": "#/definitions/A", "definitions": {"A": NAMED}}, "{"),
        ({"anyOf": [{"type": "object"}, NAMED]}, "{"),
        ({"allOf": [{"title": "x"}, {"type": "object"}]}, "{"),
    ],
)
def test_the_root_tells_the_bracket(value: Any, bracket: str) -> None:
    assert schema(value).bracket == bracket


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"type": "string"},
        {"type": ["object", "null"]},
        {"anyOf": [{"type": "object"}, {"type": "null"}]},
        {"$ref": "#"},
        {"$ref": "#/$defs/no"},
        {"type": "object", "properties": []},
        [],
        3,
    ],
)
def test_other_roots_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"root|JSON"):
        schema(value)


@pytest.mark.parametrize(
    ("content", "result"),
    [
        ('{"a": 1}', VALID),
        ('{"a": 1.5}', INVALID),
        ("{}", INVALID),
        ('{"a": NaN}', INVALID),
        ('{"a": 1} x', INVALID),
        ("[" * 100_000, INVALID),
    ],
)
def test_verdicts(content: str, result: int) -> None:
    assert schema(NAMED).check(content).result == result


def test_patterns_are_not_tried() -> None:
    """One that backtracks for ages; the rest is checked all the same."""
    slow = {"type": "string", "pattern": "^(a+)+$"}
    value = {"type": "object", "properties": {"a": slow}, "required": ["a"]}
    assert schema(value).check(json.dumps({"a": "a" * 50 + "!"})).result == UNCHECKED
    assert schema(value).check("{}").result == INVALID
    keys = {"type": "object", "patternProperties": {"^(a+)+$": {}}, "additionalProperties": False}
    assert schema(keys).check(json.dumps({"a" * 50 + "!": 1})).result == UNCHECKED


def test_references_are_counted_and_stay_in_the_schema() -> None:
    """2^40 of them; and one to another machine."""
    doubled = {f"n{i}": {"allOf": [{"$ref": f"#/$defs/n{i + 1}"}] * 2} for i in range(40)}
    value = {"type": "object", "$ref": "#/$defs/n0", "$defs": {**doubled, "n40": {}}}
    check = schema(value).check("{}")
    assert check.result == UNCHECKED
    assert "10000" in check.reason
    away = {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:1/schema"}}}
    assert schema(away).check('{"a": 1}').result == UNCHECKED


@pytest.mark.parametrize(
    ("text", "number"),
    [("{}x", 2), ('{"}": "\\"}"}]', 12), ("[[],{}] ", 7), ('{"a": [1', None), ('{"a}', None)],
)
def test_the_end_of_a_value(text: str, number: int | None) -> None:
    end = JsonEnd()
    found = next((i for i, c in enumerate(text, 1) if end.feed(c)), None)
    assert found == number
