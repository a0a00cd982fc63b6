"""What is read from an answer: its content as sampled, texts of tokens, types of arguments."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from hypothesis import strategies
from seamflow.rollout.v1 import rollout_service_pb2 as pb

from rollout.gateway.prompt.answer.response_format import typed_tool
from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.gateway.prompt.prompt import Prompt
from rollout.http_gateway.dialects.dialect import event
from tests.suites.field.kind import Kind
from tests.suites.roundtrips.client import said_by
from tests.suites.roundtrips.families import FAMILIES

FUNCTION_BODY = "    for x in xs:\n        yield x\n"


@cache
def _template(name: str) -> ChatTemplate:
    folder = Path(tempfile.mkdtemp(prefix="seamflow-answers-"))
    return ChatTemplate(FAMILIES[name].make_model(folder))


def _check_content(case: tuple[str, str]) -> None:
    """Between what the template writes and the end token, content is what was sampled."""
    name, text = case
    template = _template(name)
    question = pb.Messages(messages=[said_by("user", "hello")])
    prompt = Prompt.parse(pb.GenerateRequest(messages=question), template, "as_sampled")
    ids = [*template.encode_text(text), *sorted(template.stop_token_ids)[:1]]
    message = template.parse(ids, None, prompt.conversation).message
    assert not {*message} - {"role", "content"}, message
    assert message["content"] in (text, text.removeprefix(" ")), message["content"]
    assert message["content"] == text or _writes_a_space(name), "the template's own space alone"


def _writes_a_space(name: str) -> bool:
    return name == "mistral"


def _check_bytes(case: tuple[str, str]) -> None:
    """Together, the bytes of the tokens are the text's, whatever characters they cut."""
    name, text = case
    template = _template(name)
    found = b"".join(template.token_bytes(each) for each in template.encode_text(text))
    assert found.decode() == text


def _check_event(text: str) -> None:
    """One line of data, for readers that split lines in Python's way too."""
    written = event({"delta": text}).decode()
    first, *others = written.splitlines()
    assert [*others] == [""]
    assert json.loads(first.removeprefix("data: ")) == {"delta": text}


def _check_types(case: tuple[dict[str, Any], dict[str, Any], list[Any]]) -> None:
    """The types are those of the values that the schema allows, by jsonschema's own checker."""
    schema, definitions, values = case
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": definitions}
    tool = typed_tool({"function": {"name": "f", "parameters": parameters}})
    types = tool["function"]["parameters"]["properties"]["x"]["type"]
    validator = jsonschema.Draft202012Validator({**schema, "$defs": definitions})
    typed = jsonschema.Draft202012Validator({"type": types})
    assert types
    for value in values:
        assert validator.is_valid(value), "the case itself"
        assert typed.is_valid(value), (value, types)


_PLAIN = strategies.text(
    strategies.sampled_from("ab 1\n\té数 \u2028.,:"), min_size=1, max_size=40
).filter(lambda text: bool(text.strip()))
_ANSWERING = sorted({*FAMILIES} - {"qwen3_opened"})
"""Families whose prompts do not open reasoning."""
_VALUES: dict[str, strategies.SearchStrategy[Any]] = {
    "string": strategies.text(max_size=5),
    "integer": strategies.integers(-9, 9),
    "boolean": strategies.booleans(),
    "null": strategies.none(),
    "object": strategies.dictionaries(strategies.text(max_size=3), strategies.integers(0, 3)),
    "array": strategies.lists(strategies.integers(0, 3), max_size=3),
}


@strategies.composite
def _schemas(draw: Any) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """A schema of one of these types, written in one of the ways that there are, and values."""
    kind = draw(strategies.sampled_from(sorted(_VALUES)))
    values = draw(strategies.lists(_VALUES[kind], min_size=1, max_size=3))
    plain: dict[str, Any] = {"type": kind}
    ways: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (plain, {}),
        ({"$ref": "#/$defs/T"}, {"T": plain}),
        ({"allOf": [{"$ref": "#/$defs/T"}], "description": "d"}, {"T": plain}),
        ({"allOf": [{}, plain]}, {}),
        ({"anyOf": [plain, {"type": "null"}]}, {}),
        ({"oneOf": [{"$ref": "#/$defs/a~1b"}]}, {"a/b": {"$ref": "#/$defs/T"}, "T": plain}),
        ({"enum": values}, {}),
        ({"const": values[0]}, {}),
        ({"type": [kind, "null"]}, {}),
    ]
    if kind == "object":
        ways += [({"properties": {}}, {}), ({"additionalProperties": {"type": "integer"}}, {})]
    if kind == "array":
        ways += [({"items": {"type": "integer"}}, {}), ({"prefixItems": []}, {})]
    schema, definitions = draw(strategies.sampled_from(ways))
    return schema, definitions, values[:1]


KINDS = (
    Kind(
        name="content of answers",
        check=_check_content,
        examples=[("hermes", FUNCTION_BODY), *((name, "  x\n\n") for name in _ANSWERING)],
        generated=strategies.tuples(strategies.sampled_from(_ANSWERING), _PLAIN),
        short=30,
    ),
    Kind(
        name="bytes of tokens",
        check=_check_bytes,
        examples=[(name, "naïve 数学 \U0001f600") for name in sorted(FAMILIES)],
        generated=strategies.tuples(
            strategies.sampled_from(sorted(FAMILIES)), strategies.text(max_size=30)
        ),
        short=30,
    ),
    Kind(
        name="events of a stream",
        check=_check_event,
        examples=["a\u2028b", "a\u2029b", "a\x85b", "a\nb\r\nc"],
        generated=strategies.text(
            strategies.characters(exclude_categories=["Cs"], exclude_characters="\v\f\x1c\x1d\x1e")
        ),
        short=50,
    ),
    Kind(
        name="types of arguments",
        check=_check_types,
        examples=[
            ({"$ref": "#/$defs/P"}, {"P": {"type": "object", "properties": {}}}, [{"a": 1}]),
            ({"allOf": [{"$ref": "#/$defs/P"}]}, {"P": {"properties": {"a": {}}}}, [{"a": 1}]),
            ({"enum": [{"a": 1}, {"b": 2}]}, {}, [{"a": 1}]),
        ],
        generated=_schemas(),
        short=50,
    ),
)
