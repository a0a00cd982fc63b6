"""Requests of each dialect: what a turn becomes of them, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout.http_gateway.api_error import ApiError
from rollout.http_gateway.dialects.anthropic_messages import AnthropicMessages, CountTokens
from rollout.http_gateway.dialects.chat_completions import ChatCompletions
from rollout.http_gateway.dialects.dialect import Dialect, TurnRequest
from rollout.http_gateway.dialects.responses import Responses
from rollout.http_gateway.dialects.token_generate import TokenGenerate

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
MESSAGES: dict[str, Any] = {**CHAT, "max_tokens": 5}
RESPONSES: dict[str, Any] = {"input": "hi"}
TOKENS: dict[str, Any] = {"token_ids": [1, 2]}
ALL: list[tuple[Dialect, dict[str, Any]]] = [
    (ChatCompletions(), CHAT),
    (AnthropicMessages(), MESSAGES),
    (CountTokens(), CHAT),
    (Responses(), RESPONSES),
    (TokenGenerate(), TOKENS),
]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}


def parsed(dialect: Dialect, request: dict[str, Any], **changes: Any) -> TurnRequest:
    """The turn that a request asks for."""
    return dialect.parse(json.dumps({**request, **changes}).encode())


def refused(dialect: Dialect, body: bytes) -> ApiError:
    """Why a request is refused."""
    with pytest.raises(ApiError) as error:
        dialect.parse(body)
    return error.value


def ids(value: object) -> str | None:
    """The dialect's name as a test's."""
    return type(value).__name__ if isinstance(value, Dialect) else None


@pytest.mark.parametrize(("dialect", "request_"), ALL, ids=ids)
def test_the_least_request_is_a_turn(dialect: Dialect, request_: dict[str, Any]) -> None:
    """Messages or ids, no tools, one JSON object as reply."""
    turn = parsed(dialect, request_)
    expected = [] if isinstance(dialect, TokenGenerate) else [{"role": "user", "content": "hi"}]
    assert list(turn.messages) == expected
    assert list(turn.token_ids) == request_.get("token_ids", [])
    assert (turn.stream, list(turn.tools), turn.tool_choice) == (False, [], "auto")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'{"a": NaN}'])
@pytest.mark.parametrize(("dialect", "request_"), ALL, ids=ids)
def test_what_is_no_json_object_is_refused(
    dialect: Dialect, request_: dict[str, Any], body: bytes
) -> None:
    """Status 400, for people and for programs."""
    error = refused(dialect, body)
    assert (error.status, error.code) == (400, "invalid_json")


@pytest.mark.parametrize(("dialect", "request_"), ALL, ids=ids)
def test_an_unknown_parameter_is_refused_and_null_is_not(
    dialect: Dialect, request_: dict[str, Any]
) -> None:
    """A name that is misspelt would change nothing in silence."""
    error = refused(dialect, json.dumps({**request_, "max_tokns": 1}).encode())
    assert (error.param, error.code) == ("max_tokns", "unsupported_parameter")
    assert parsed(dialect, request_, max_tokns=None)


@pytest.mark.parametrize(
    ("dialect", "changes", "param"),
    [
        (ChatCompletions(), {"messages": []}, "messages"),
        (ChatCompletions(), {"messages": [{"role": "robot"}]}, "messages[0].role"),
        (ChatCompletions(), {"temperature": -1}, "temperature"),
        (ChatCompletions(), {"temperature": "1"}, "temperature"),
        (ChatCompletions(), {"top_p": 0}, "top_p"),
        (ChatCompletions(), {"max_tokens": 0}, "max_tokens"),
        (ChatCompletions(), {"n": 2}, "n"),
        (ChatCompletions(), {"presence_penalty": 0.5}, "presence_penalty"),
        (ChatCompletions(), {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (ChatCompletions(), {"response_format": {"type": "json_schema"}}, None),
        (AnthropicMessages(), {"max_tokens": None}, "max_tokens"),
        (AnthropicMessages(), {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        (AnthropicMessages(), {"mcp_servers": [{}]}, "mcp_servers"),
        (Responses(), {"input": [{"content": "hi"}]}, "input[0].role"),
        (Responses(), {"input": [{"type": "computer_call"}]}, "input[0].type"),
        (Responses(), {"input": [{"type": "function_call"}]}, "input[0].name"),
        (Responses(), {"background": True}, "background"),
        (TokenGenerate(), {"token_ids": []}, "token_ids"),
        (TokenGenerate(), {"token_ids": [-1]}, "token_ids[0]"),
        (TokenGenerate(), {"sampling_params": {"n": 2}}, "sampling_params.n"),
        (TokenGenerate(), {"sampling_params": {"min_p": 2}}, "sampling_params.min_p"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(
    dialect: Dialect, changes: dict[str, Any], param: str | None
) -> None:
    """As the client wrote it, in the message too."""
    request = next(each for known, each in ALL if type(known) is type(dialect))
    error = refused(dialect, json.dumps({**request, **changes}).encode())
    assert error.status == 400
    assert param is None or error.param == param
    assert error.param is not None
    assert error.param in error.message


def test_a_long_value_is_cut_in_its_error() -> None:
    """An agent cannot fill logs with it."""
    error = refused(ChatCompletions(), json.dumps({**CHAT, "top_p": "x" * 10_000}).encode())
    assert len(error.message) < 300


def test_a_part_that_is_no_text_is_refused_by_its_place() -> None:
    """Pictures would be dropped in silence."""
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]
    messages = [{"role": "user", "content": parts}]
    error = refused(ChatCompletions(), json.dumps({"messages": messages}).encode())
    assert error.param == "messages[0].content[1].type"
    error = refused(AnthropicMessages(), json.dumps({**MESSAGES, "messages": messages}).encode())
    assert error.param == "messages[0].content[1].type"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 4),
        ({}, None),
    ],
)
def test_the_budget_has_two_names(given: dict[str, int], found: int | None) -> None:
    """OpenAI's new one counts; without one the gateway's default is used."""
    sampling = parsed(ChatCompletions(), CHAT, **given).sampling
    assert (sampling.max_new_tokens if sampling.HasField("max_new_tokens") else None) == found


def test_sampling_parameters_reach_the_contract() -> None:
    """By their values; what is not given is left to the gateway."""
    given = {"temperature": 0.5, "top_k": -1, "seed": -7, "stop": "x", "stop_token_ids": [3]}
    sampling = parsed(ChatCompletions(), CHAT, **given).sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 0, -7)
    assert (list(sampling.stop), list(sampling.stop_token_ids)) == (["x"], [3])
    assert not sampling.HasField("top_p")
    stops = parsed(AnthropicMessages(), MESSAGES, stop="x", stop_sequences=["y"]).sampling.stop
    assert list(stops) == ["x", "y"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("function_call", {"name": "f"}), ("images", ["AA=="]), ("audio", {"id": "a"})],
)
def test_content_that_is_no_text_is_refused(key: str, value: object) -> None:
    """By its name; null, as SDKs send it back, is accepted."""
    message = {"role": "assistant", "content": "a", key: value}
    asked = {**CHAT, "messages": [message, {"role": "user", "content": "b"}]}
    error = refused(ChatCompletions(), json.dumps(asked).encode())
    assert error.param == f"messages[0].{key}"
    message[key] = None
    assert ChatCompletions().parse(json.dumps(asked).encode()).messages


@pytest.mark.parametrize("is_error", [True, False])
def test_a_tools_error_flag_is_refused(is_error: bool) -> None:
    """It would be lost; false says nothing."""
    result = {"type": "tool_result", "tool_use_id": "c", "content": "no", "is_error": is_error}
    asked = {**MESSAGES, "messages": [{"role": "user", "content": [result]}]}
    if is_error:
        error = refused(AnthropicMessages(), json.dumps(asked).encode())
        assert "is_error" in (error.param or "")
    else:
        assert AnthropicMessages().parse(json.dumps(asked).encode()).messages


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ("any", "required"),
        ({"type": "function", "function": {"name": "f"}}, {"name": "f"}),
    ],
)
def test_a_tool_choice_is_the_sdks(choice: object, found: object) -> None:
    """With "none" the template is shown the tools, too."""
    turn = parsed(ChatCompletions(), CHAT, tools=[TOOL], tool_choice=choice)
    assert (turn.tool_choice, len(turn.tools)) == (found, 1)
    turn = parsed(
        Responses(), RESPONSES, tools=[{"type": "function", **FUNCTION}], tool_choice=choice
    )
    assert (turn.tool_choice, len(turn.tools)) == (found, 1)


@pytest.mark.parametrize(
    ("mode", "names", "found"),
    [
        ("required", ["f"], {"name": "f"}),
        ("required", ["f", "g"], "required"),
        ("auto", ["f", "g"], "auto"),
    ],
)
def test_allowed_tools_are_all_or_one(mode: str, names: list[str], found: object) -> None:
    """Some of them would need another prompt: refused."""
    tools = [{**TOOL, "function": {"name": name}} for name in ("f", "g")]
    allowed = [{"type": "function", "function": {"name": name}} for name in names]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    assert parsed(ChatCompletions(), CHAT, tools=tools, tool_choice=choice).tool_choice == found
    choice["allowed_tools"] = {"mode": "auto", "tools": allowed[:1]}
    error = refused(
        ChatCompletions(), json.dumps({**CHAT, "tools": tools, "tool_choice": choice}).encode()
    )
    assert (error.param, error.code) == ("tool_choice", "unsupported_value")


SCHEMA = {"type": "object", "required": ["a"]}


@pytest.mark.parametrize(
    ("dialect", "request_", "changes"),
    [
        (
            ChatCompletions(),
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        ),
        (
            AnthropicMessages(),
            MESSAGES,
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        ),
        (Responses(), RESPONSES, {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ],
    ids=ids,
)
def test_a_schema_is_found_where_the_dialect_has_it(
    dialect: Dialect, request_: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Control: without it any text is an answer."""
    assert parsed(dialect, request_, **changes).response_schema == SCHEMA
    assert parsed(dialect, request_).response_schema is None
