"""The start of a tool agent: what the model is taught is what the agent will send and get."""

from __future__ import annotations

import json
from typing import Any

from examples.quickstart import prepare, task
from examples.quickstart.lift import RIDE, Lift
from examples.quickstart.prepare_tools import CHAT_TEMPLATE, TOOL_WORDS, tool_calls
from rollout.gateway.prompt.answer.response_format import load_response_format
from tests.lib.rendering import rendered_ids


def make_conversation(payload: task.Payload) -> list[dict[str, Any]]:
    """A faultless one, as an agent sends it."""
    lift = Lift(payload)
    messages: list[dict[str, Any]] = [{"role": "user", "content": lift.call()}]
    for path in task.paths(payload):
        floors = f" {' '.join(map(task.floor_name, path))} "
        call = {"name": "ride", "arguments": {"floors": floors}}
        answer = {"type": "function", "function": call}
        messages.append({"role": "assistant", "content": None, "tool_calls": [answer]})
        messages.append({"role": "tool", "content": lift.ride(floors)})
    assert lift.rewards() == {"reward": 1.0, "success": 1.0}
    return [*messages, {"role": "assistant", "content": "done"}]


def test_demonstrations_look_like_the_agents_conversations() -> None:
    """The warm start trains on the very tokens that the chat template renders."""
    tokenizer = prepare.build_tokenizer((*prepare.WORDS, *TOOL_WORDS), CHAT_TEMPLATE)
    payload = next(task.tasks(0, 1, "train"))
    answers = [" ".join(map(task.floor_name, path)) for path in task.paths(payload)]
    example = prepare._example(tokenizer.get_vocab(), tool_calls(payload, answers))
    tools = [{"type": "function", "function": RIDE}]
    assert example.token_ids == rendered_ids(tokenizer, make_conversation(payload), tools=tools)
    assert tokenizer.unk_token_id not in example.token_ids


def test_the_gateway_finds_the_call_in_what_is_taught() -> None:
    """Its format is chosen by the markers of the template."""
    tokenizer = prepare.build_tokenizer((*prepare.WORDS, *TOOL_WORDS), CHAT_TEMPLATE)
    parser = load_response_format("auto", tokenizer, tokenizer.all_special_tokens)
    payload = {"start": 3, "calls": [5, 4]}
    (_, first), *_, (_, last) = tool_calls(payload, ["04 05", "04"])
    (call,) = parser.parse(first, "assistant: ").message["tool_calls"]
    assert call["function"] == {"name": "ride", "arguments": {"floors": " 04 05 "}}
    parsed = json.loads(json.dumps(parser.parse(last, "assistant: ").message))
    assert parsed["content"].strip() == "done"
    assert "tool_calls" not in parsed


def test_a_lift_answers_with_the_next_call_and_scores_all_rides() -> None:
    """Rides that nobody called for are faults."""
    lift = Lift({"start": 3, "calls": [5, 4]})
    assert lift.call() == "at 03 up to 05"
    assert lift.ride("04 05") == "at 05 down to 04"
    assert lift.ride("04") == "idle"
    assert lift.rewards()["success"] == 1.0
    assert lift.ride("03") == "idle"
    assert lift.rewards()["success"] == 0.0
    idle = Lift({"start": 3, "calls": [5, 4]})
    assert idle.rewards() == {"reward": 0.0, "success": 0.0}
