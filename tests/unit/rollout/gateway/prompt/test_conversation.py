"""Messages, tools and keys: what agents send back is what was recorded, or is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from seamflow.rollout.v1 import rollout_service_pb2 as pb

from rollout.gateway.prompt.conversation import (
    answer_message,
    message_key,
    parse_conversation,
)
from services.chassis.errors import ServiceError

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2]}}}


def text(value: str) -> list[pb.ContentPart]:
    """One part."""
    return [pb.ContentPart(type="text", text=value)]


def parsed(*messages: pb.Message, **fields: Any) -> list[Any]:
    """The messages as the template gets them."""
    return list(parse_conversation(pb.Messages(messages=messages, **fields)).messages)


def test_every_field_reaches_the_template() -> None:
    """Roles, parts, reasoning, tool calls and their answers, in the form that templates take."""
    arguments = json.dumps({"b": [2], "a": 1})
    messages = parsed(
        pb.Message(role="system", content=[*text("be "), *text("brief")]),
        pb.Message(
            role="assistant",
            reasoning="hm",
            tool_calls=[pb.ToolCall(id="c1", name="add", arguments_json=arguments)],
        ),
        pb.Message(role="tool", content=text("3"), tool_call_id="c1", name="add"),
    )
    assert messages[0] == {"role": "system", "content": "be brief"}
    assert messages[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", **CALL}],
    }
    assert messages[2] == {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"}


def test_tools_and_template_arguments_reach_the_template() -> None:
    """A tool is a function with a schema; template arguments are a JSON object."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    found = parse_conversation(
        pb.Messages(
            messages=[pb.Message(role="user", content=text("hi"))],
            tools=[pb.Tool(name="add", description="adds", parameters_json=json.dumps(schema))],
            template_arguments_json='{"enable_thinking": false}',
        )
    )
    function = {"name": "add", "description": "adds", "parameters": schema}
    assert list(found.tools) == [{"type": "function", "function": function}]
    assert found.arguments == {"enable_thinking": False}


USER = pb.Message(role="user", content=text("hi"))


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        (pb.Messages(messages=[pb.Message(role="bot")]), "messages.messages[0].role", "'bot'"),
        (
            pb.Messages(
                messages=[
                    USER,
                    pb.Message(role="user", content=[pb.ContentPart(type="image_url")]),
                ]
            ),
            "messages.messages[1].content[0].type",
            "'image_url'",
        ),
        (
            pb.Messages(
                messages=[
                    pb.Message(
                        role="assistant", tool_calls=[pb.ToolCall(name="f", arguments_json="[")]
                    )
                ]
            ),
            "messages.messages[0].tool_calls[0].arguments_json",
            "'['",
        ),
        (
            pb.Messages(messages=[pb.Message(role="user", reasoning="hm")]),
            "messages.messages[0].reasoning",
            "'user'",
        ),
        (pb.Messages(messages=[USER], tools=[pb.Tool()]), "messages.tools[0].name", "''"),
        (
            pb.Messages(messages=[USER], tools=[pb.Tool(name="f", parameters_json="3")]),
            "messages.tools[0].parameters_json",
            "'3'",
        ),
        (
            pb.Messages(messages=[USER], template_arguments_json="no"),
            "messages.template_arguments_json",
            "'no'",
        ),
    ],
)
def test_a_bad_message_is_refused_by_name(given: pb.Messages, field: str, value: str) -> None:
    """The error names the field and its value."""
    with pytest.raises(ServiceError) as caught:
        parse_conversation(given)
    assert caught.value.violations[0].field == field
    assert f"{field} is {value}" in caught.value.message


ANSWER: dict[str, Any] = {"role": "assistant", "content": "Sure.", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    "echoed",
    [
        {**ANSWER, "tool_calls": [{"id": "other", **CALL}]},
        {**ANSWER, "content": "Sure. \n"},
        {**ANSWER, "name": "agent"},
        {
            **ANSWER,
            "tool_calls": [
                {"function": {"arguments": {"b": [2], "a": 1}, "name": "add"}, "type": "function"}
            ],
        },
    ],
    ids=["another id", "white space", "a name", "other order"],
)
def test_what_a_client_changes_without_meaning_keeps_the_key(echoed: dict[str, Any]) -> None:
    """Clients make ids of their own, reorder arguments and trim text."""
    assert message_key(echoed) == message_key(ANSWER)


@pytest.mark.parametrize(
    "other",
    [
        {**ANSWER, "content": "No."},
        {**ANSWER, "tool_calls": []},
        {**ANSWER, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]},
        {**ANSWER, "role": "user"},
    ],
)
def test_another_answer_has_another_key(other: dict[str, Any]) -> None:
    """Negative control."""
    assert message_key(other) != message_key(ANSWER)


def test_reasoning_is_the_second_part_of_a_key() -> None:
    """So that the store matches an answer whose reasoning the client has dropped."""
    key = message_key({**ANSWER, "reasoning_content": "hm"})
    base, _, second = key.partition(":")
    assert base == message_key(ANSWER)
    assert second
    assert key != message_key({**ANSWER, "reasoning_content": "ah"})


def test_an_answer_split_in_two_is_one() -> None:
    """Some clients send the text and the tool calls of an answer as two messages."""
    calls = [pb.ToolCall(name="add", arguments_json='{"a": 1, "b": [2]}')]
    split = parsed(
        pb.Message(role="assistant", content=text("Sure.")),
        pb.Message(role="assistant", tool_calls=calls),
    )
    assert [message_key(message) for message in split] == [message_key(ANSWER)]
    apart = parsed(
        pb.Message(role="assistant", content=text("Sure.")),
        pb.Message(role="assistant", content=text("And:"), tool_calls=calls),
    )
    assert len(apart) == 2


@pytest.mark.parametrize(
    "arguments",
    ['{"b": [2], "a": 1}', '{"a":1.0,"b":[2.0]}', r'"{\"a\": 1, \"b\": [2]}"'],
    ids=["other order", "whole numbers", "a string"],
)
def test_arguments_in_another_encoding_keep_the_key(arguments: str) -> None:
    """JavaScript writes 1.0 as 1; some clients encode an object twice."""
    calls = [pb.ToolCall(name="add", arguments_json=arguments)]
    (echoed,) = parsed(pb.Message(role="assistant", content=text("Sure."), tool_calls=calls))
    assert message_key(echoed) == message_key(ANSWER)


@pytest.mark.parametrize("arguments", ["", "null", "{}", '"{}"', '""'])
def test_no_arguments_are_no_arguments(arguments: str) -> None:
    """However they are written."""
    calls = [pb.ToolCall(name="now", arguments_json=arguments)]
    (echoed,) = parsed(pb.Message(role="assistant", tool_calls=calls))
    assert echoed["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}


@pytest.mark.parametrize("arguments", ['{"a": true, "b": [2]}', '{"a": 1.5, "b": [2]}'])
def test_other_numbers_have_another_key(arguments: str) -> None:
    """Negative control."""
    calls = [pb.ToolCall(name="add", arguments_json=arguments)]
    (echoed,) = parsed(pb.Message(role="assistant", content=text("Sure."), tool_calls=calls))
    assert message_key(echoed) != message_key(ANSWER)


def test_an_answer_in_many_parts_is_one() -> None:
    """Reasoning, text, and tool calls one by one; some parts empty."""
    calls = [pb.ToolCall(name="f", arguments_json="{}"), pb.ToolCall(name="g")]
    parts = [
        pb.Message(role="assistant", reasoning="hm"),
        pb.Message(role="assistant", content=text("")),
        pb.Message(role="assistant", content=text("Sure.")),
        *(pb.Message(role="assistant", tool_calls=[call]) for call in calls),
    ]
    whole = pb.Message(role="assistant", reasoning="hm", content=text("Sure."), tool_calls=calls)
    assert parsed(*parts) == parsed(whole)
    answered = pb.Message(role="tool", content=text("3"))
    apart = parsed(parts[3], answered, parts[4], answered)
    assert [message["role"] for message in apart] == ["assistant", "tool"] * 2


def test_an_answer_comes_back_with_the_same_key() -> None:
    """What the gateway sends to the agent parses to the message it was made of."""
    answer = {**ANSWER, "reasoning_content": "hm"}
    (again,) = parsed(answer_message(answer))
    assert message_key(again) == message_key(answer)
