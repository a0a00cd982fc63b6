"""Conversations of each dialect become the same messages, so that a prompt continues its record."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout.http_gateway.api_error import ApiError
from rollout.http_gateway.dialects.anthropic_messages import AnthropicMessages
from rollout.http_gateway.dialects.chat_completions import ChatCompletions
from rollout.http_gateway.dialects.dialect import Dialect
from rollout.http_gateway.dialects.responses import Responses

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def messages(dialect: Dialect, **request: Any) -> list[dict[str, Any]]:
    """The messages of a request."""
    return list(dialect.parse(json.dumps(request).encode()).messages)


def test_the_developer_is_the_system() -> None:
    """OpenAI's new name; chat templates know the old one."""
    (found,) = messages(ChatCompletions(), messages=[{"role": "developer", "content": "s"}])
    assert found == {"role": "system", "content": "s"}
    (found,) = messages(Responses(), input=[{"role": "developer", "content": "s"}])
    assert found == {"role": "system", "content": "s"}


def test_what_a_client_adds_to_a_message_is_left_out() -> None:
    """It sends whole replies back."""
    sent: dict[str, Any] = {"role": "assistant", "content": "a", "annotations": []}
    assert messages(ChatCompletions(), messages=[sent]) == [{"role": "assistant", "content": "a"}]


def test_calls_that_are_written_as_text_are_calls() -> None:
    """Of an assistant, in a line of their own, and well formed; any other text stays as it is."""
    listed = repr([{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {}}}])
    said = {"role": "assistant", "content": f"so\nCalling tools:\n{listed}"}
    (found,) = messages(ChatCompletions(), messages=[said])
    assert found["content"] == "so"
    assert found["tool_calls"] == [{"id": "c1", "function": {"name": "f", "arguments": {}}}]
    for other in (
        {**said, "role": "user"},
        {**said, "content": f"so Calling tools:\n{listed}"},
        {**said, "content": "Calling tools:\n[{'id': 'c1'}]"},
        {**said, "content": "Calling tools:\n[__import__('os').getcwd()]"},
        {**said, "content": "Calling tools:\n" + "[" * 1000},
    ):
        assert messages(ChatCompletions(), messages=[other]) == [other]


def test_blocks_of_anthropic_are_messages() -> None:
    """Thinking, calls and results; text between results is a message of its own."""
    sent = [
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "r"},
                {"type": "text", "text": "go"},
                {"type": "text", "text": " on"},
            ],
        },
    ]
    function = {"name": "f", "arguments": {"a": 1}}
    assert messages(AnthropicMessages(), system="s", messages=sent, max_tokens=1) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "a",
            "reasoning_content": "t",
            "tool_calls": [{"id": "c1", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
        {"role": "user", "content": "go on"},
    ]


def test_items_of_one_answer_are_one_message() -> None:
    """Reasoning, text and calls; results and the next question are messages of their own."""
    items = [
        {"role": "user", "content": "q"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "r"},
    ]
    assert messages(Responses(), input=items, instructions="s") == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "reasoning_content": "t",
            "content": "a",
            "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
    ]


def test_references_name_parts_of_recorded_answers() -> None:
    """Parts of one answer are one message; those of another turn another."""
    items = [{"type": "item_reference", "id": each} for each in ("rs_t1", "msg_t1", "fc_t1_0")]
    items += [{"type": "item_reference", "id": "msg_t2"}]
    recorded = {"turn_id": "t1", "reasoning": True, "content": True, "tool_calls": [0]}
    first, second = messages(Responses(), input=items)
    assert first == {"role": "assistant", "recorded": recorded}
    assert second["recorded"]["turn_id"] == "t2"


@pytest.mark.parametrize("item_id", ["", "msg_", "fc_t1", "fc_t1_x", "fc_t1_99999", "other_t1"])
def test_a_reference_that_no_reply_had_is_not_found(item_id: str) -> None:
    """Status 404, with its place."""
    items = [{"type": "item_reference", "id": item_id}]
    with pytest.raises(ApiError) as refused:
        messages(Responses(), input=items)
    assert (refused.value.status, refused.value.param) == (404, "input[0].id")


def test_a_response_that_is_followed_is_named_by_its_turn() -> None:
    """Without the prefix of its id."""
    body = json.dumps({"input": "x", "previous_response_id": "resp_t1"}).encode()
    assert Responses().parse(body).after_turn_id == "t1"


def test_a_call_keeps_its_arguments_as_they_were_sent() -> None:
    """Text stays text, so that its digest is that of the recorded answer."""
    sent = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    (found,) = messages(ChatCompletions(), messages=[sent])
    assert found["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
