"""One turn, whole and as events, in each dialect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from seamflow.client.turn import Check, Turn, WeightSpan
from seamflow.common.v1.tokens_pb2 import Tokens
from seamflow.rollout.v1.rollout_service_pb2 import TokenChunk

from rollout.http_gateway.api_error import ApiError
from rollout.http_gateway.dialects.anthropic_messages import AnthropicMessages
from rollout.http_gateway.dialects.chat_completions import ChatCompletions
from rollout.http_gateway.dialects.dialect import Dialect, event, rest, seamflow_fields
from rollout.http_gateway.dialects.responses import Responses
from rollout.http_gateway.dialects.token_generate import TokenGenerate

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
REQUESTS: tuple[tuple[Dialect, dict[str, Any]], ...] = (
    (ChatCompletions(), {"messages": [{"role": "user", "content": "q"}]}),
    (AnthropicMessages(), {"messages": [{"role": "user", "content": "q"}], "max_tokens": 9}),
    (Responses(), {"input": "q"}),
)


def turn_of(reason: str = "stop", stop: str = "", **message: Any) -> Turn:
    """A turn of two tokens, with this answer."""
    return Turn(
        turn_id="t1",
        message={"role": "assistant", "content": "", **message},
        token_ids=[7, 8],
        logprobs=[-0.5, -0.25],
        num_prompt_tokens=3,
        finish_reason=reason,
        stop=stop,
    )


def reply(dialect: Dialect, request: Mapping[str, Any], turn: Turn) -> dict[str, Any]:
    """The whole reply."""
    return dialect.reply(dialect.parse(json.dumps(request).encode()), turn)


def events(
    dialect: Dialect, request: Mapping[str, Any], turn: Turn, *chunks: TokenChunk
) -> list[dict[str, Any]]:
    """The events of the same reply as a stream, decoded."""
    asked = dialect.parse(json.dumps({**request, "stream": True}).encode())
    stream = dialect.events(asked, turn.turn_id)
    sent = stream.start() + b"".join(map(stream.chunk, chunks)) + stream.end(turn)
    lines = [line for line in sent.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def name(dialect: object) -> str | None:
    """Of the dialect, for a test's name."""
    return type(dialect).__name__ if isinstance(dialect, Dialect) else None


CHAT, ANTHROPIC, RESPONSES = REQUESTS


@pytest.mark.parametrize(
    ("turn", "chat", "anthropic", "responses"),
    [
        (turn_of(content="a"), "stop", "end_turn", "completed"),
        (turn_of("length", content="a"), "length", "max_tokens", "incomplete"),
        (turn_of(stop="x", content="a"), "stop", "stop_sequence", "completed"),
        (turn_of(tool_calls=[CALL]), "tool_calls", "tool_use", "completed"),
        (turn_of("length", tool_calls=[CALL]), "length", "max_tokens", "incomplete"),
    ],
    ids=["ends", "is cut", "stops at a string", "calls", "is cut in a call"],
)
def test_why_a_turn_ended_has_a_word_in_each_dialect(
    turn: Turn, chat: str, anthropic: str, responses: str
) -> None:
    """Whole and as events."""
    assert reply(*CHAT, turn)["choices"][0]["finish_reason"] == chat
    assert events(*CHAT, turn)[-1]["choices"][0]["finish_reason"] == chat
    assert reply(*ANTHROPIC, turn)["stop_reason"] == anthropic
    (delta,) = [each for each in events(*ANTHROPIC, turn) if each["type"] == "message_delta"]
    assert delta["delta"]["stop_reason"] == anthropic
    assert reply(*RESPONSES, turn)["status"] == responses
    assert events(*RESPONSES, turn)[-1]["response"]["status"] == responses


def test_an_answer_of_calls_alone_has_no_content() -> None:
    """null, not the empty text: clients take that for an answer."""
    message = reply(*CHAT, turn_of(tool_calls=[CALL]))["choices"][0]["message"]
    assert (message["content"], message["tool_calls"]) == (None, [CALL])
    (block,) = reply(*ANTHROPIC, turn_of(tool_calls=[CALL]))["content"]
    assert (block["type"], block["input"]) == ("tool_use", {"a": 1})


def test_reasoning_has_the_names_of_both_apis() -> None:
    """And a signature where clients want one to send it back."""
    turn = turn_of(content="a", reasoning_content="r")
    message = reply(*CHAT, turn)["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"]) == ("r", "r")
    thinking, text = reply(*ANTHROPIC, turn)["content"]
    assert (thinking["thinking"], text["text"]) == ("r", "a")
    assert thinking["signature"]
    kinds = [item["type"] for item in reply(*RESPONSES, turn)["output"]]
    assert kinds == ["reasoning", "message"]


@pytest.mark.parametrize("num_sent", [0, 1, 2])
def test_events_are_the_whole_answer(num_sent: int) -> None:
    """Whatever was sent before the end: the end brings the rest, once."""
    turn = turn_of(content="ab", reasoning_content="rs", tool_calls=[CALL])
    parts = [
        TokenChunk(reasoning_delta="r", num_prompt_tokens=3),
        TokenChunk(reasoning_delta="s", content_delta="a"),
    ]
    chat = [each["choices"][0]["delta"] for each in events(*CHAT, turn, *parts[:num_sent])]
    assert "".join(each.get("content") or "" for each in chat) == "ab"
    assert "".join(each.get("reasoning_content", "") for each in chat) == "rs"
    assert [each["tool_calls"] for each in chat if "tool_calls" in each] == [[{"index": 0, **CALL}]]
    deltas = [
        each["delta"]
        for each in events(*ANTHROPIC, turn, *parts[:num_sent])
        if each["type"] == "content_block_delta"
    ]
    assert "".join(each.get("text", "") for each in deltas) == "ab"
    assert "".join(each.get("thinking", "") for each in deltas) == "rs"
    assert "".join(each.get("partial_json", "") for each in deltas) == '{"a": 1}'
    last = events(*RESPONSES, turn, *parts[:num_sent])[-1]
    assert last["response"]["output"] == reply(*RESPONSES, turn)["output"]


def test_what_was_sent_is_part_of_the_answer() -> None:
    """Or a client would keep text that the record has not."""
    assert rest("abc", "ab") == "c"
    with pytest.raises(ValueError, match="2 characters were sent"):
        rest("abc", "ax")


@pytest.mark.parametrize(("dialect", "request_"), REQUESTS, ids=name)
def test_tokens_are_counted_alike(dialect: Dialect, request_: dict[str, Any]) -> None:
    """Three of the prompt, two sampled."""
    usage = reply(dialect, request_, turn_of(content="a"))["usage"]
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    sampled = usage.get("completion_tokens", usage.get("output_tokens"))
    assert (prompt, sampled) == (3, 2)


def test_token_fields_come_where_they_are_asked_for() -> None:
    """Ids of prompt and answer, each log-prob with its id; control: otherwise neither."""
    turn = turn_of(content="a")
    turn.prompt_token_ids = [1, 2, 3]
    asked = {"return_token_ids": True, "logprobs": True, "return_tokens_as_token_ids": True}
    whole = reply(CHAT[0], {**CHAT[1], **asked}, turn)
    choice = whole["choices"][0]
    assert (whole["prompt_token_ids"], choice["token_ids"]) == ([1, 2, 3], [7, 8])
    content = choice["logprobs"]["content"]
    assert [(each["token"], each["logprob"]) for each in content] == [
        ("token_id:7", -0.5),
        ("token_id:8", -0.25),
    ]
    bare = reply(*CHAT, turn)
    assert "prompt_token_ids" not in bare
    assert bare["choices"][0]["logprobs"] is None


def test_ids_are_answered_with_ids() -> None:
    """As events each chunk once, and the end without any."""
    request = {"token_ids": [1], "sampling_params": {}}
    whole = reply(TokenGenerate(), request, turn_of())
    assert whole["choices"][0]["token_ids"] == [7, 8]
    chunk = TokenChunk(tokens=Tokens(token_ids=[7, 8], logprobs=[-0.5, -0.25]))
    first, last = events(TokenGenerate(), request, turn_of(), chunk)
    assert first["choices"][0]["token_ids"] == [7, 8]
    assert (last["choices"][0]["token_ids"], last["choices"][0]["finish_reason"]) == ([], "stop")


def test_spans_of_one_version_are_one() -> None:
    """Whichever server sampled them; another version is another span."""
    turn = turn_of()
    turn.spans = [
        WeightSpan(start=start, num_tokens=2, weight_version=version, server_id=server)
        for start, version, server in ((0, 1, "a"), (2, 1, "b"), (4, 2, "b"))
    ]
    assert seamflow_fields(turn)["weight_versions"] == [
        {"start": 0, "num_tokens": 4, "weight_version": 1},
        {"start": 4, "num_tokens": 2, "weight_version": 2},
    ]


def test_checks_and_mistakes_are_told_where_there_are_any() -> None:
    """Control: without them the fields are absent."""
    turn = turn_of()
    assert seamflow_fields(turn).keys() & {"parse_error", "tool_choice", "schema"} == set()
    turn.parse_error = "no call"
    turn.tool_check = Check(result="invalid", reason="no call")
    assert seamflow_fields(turn)["tool_choice"] == {"result": "invalid", "reason": "no call"}
    assert seamflow_fields(turn)["parse_error"] == "no call"


@pytest.mark.parametrize(("dialect", "request_"), REQUESTS, ids=name)
def test_an_error_in_mid_stream_is_an_event(dialect: Dialect, request_: dict[str, Any]) -> None:
    """With the message, in the form that the dialect's SDK raises."""
    asked = dialect.parse(json.dumps({**request_, "stream": True}).encode())
    sent = dialect.events(asked, "t1").error(ApiError(503, "gone", code="unavailable"))
    lines = [line for line in sent.decode().splitlines() if line.startswith("data: ")]
    assert any("gone" in line for line in lines)
    assert [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def test_no_character_of_an_answer_ends_its_event() -> None:
    """Some readers split lines at more than line feeds."""
    text = "a\nb\r\u0085\u2028\u2029c"
    sent = event({"text": text}).decode()
    (line,) = [each for each in sent.splitlines() if each]
    assert json.loads(line.removeprefix("data: "))["text"] == text
