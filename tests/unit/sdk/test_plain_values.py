"""Texts and values of other libraries in the contract's messages."""

from __future__ import annotations

import pytest
from seamflow.client.messages import to_messages
from seamflow.client.plain_values import plain, to_json_value, whole_text
from seamflow.rollout.v1 import rollout_service_pb2 as pb


def test_halves_of_characters_are_replaced() -> None:
    """Two halves are the character that they are of."""
    assert whole_text("a\ud83d") == "a\ufffd"
    assert whole_text("\ud83d\ude00") == "😀"
    with pytest.raises(UnicodeEncodeError):
        pb.Message(role="user", name="a\ud83d")  # the control


def test_tools_and_arguments_are_whole_too() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": {"x": "\ud83d"}}}
    tool = {"name": "f", "description": "\ud83d", "parameters": {"title": "\ud83d"}}
    given = to_messages([{"role": "assistant", "tool_calls": [call]}], [tool], {"x": "\ud83d"})
    assert given.messages[0].tool_calls[0].arguments_json == '{"x": "\\ufffd"}'
    assert given.tools[0].description == "\ufffd"
    assert given.tools[0].parameters_json == '{"title": "\\ufffd"}'
    assert given.template_arguments_json == '{"x": "\\ufffd"}'


def test_what_it_does_not_know_stays() -> None:
    """For whoever converts it, or refuses it with its name."""
    unknown = object()
    assert plain(unknown) is unknown
    assert to_json_value({"x": unknown}) == {"x": unknown}
