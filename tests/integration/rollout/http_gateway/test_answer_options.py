"""Forced tool calls, JSON answers and recorded items, as the official SDKs ask for them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from seamflow.common.v1 import tokens_pb2

from tests.integration.rollout.http_gateway.test_official_sdks import continued
from tests.lib.rollout.gateway.tools import ARGUMENTS, SAID
from tests.lib.rollout.http_gateway.support import ADD, World, world

ASK: Any = [{"role": "user", "content": "1 + 2?"}]
MODEL = "policy"
SUB: Any = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object"}}}
REST = ' {"b": 2, "a": 1}}</tool_call>'
CITY: Any = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
    "required": ["name", "size"],
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[World]:
    """A system with a rollout."""
    async with world(tmp_path) as found:
        yield found


def prompt_text(gateway: World, index: int = -1) -> str:
    return gateway.template.text(gateway.server.prompts[index])


async def test_a_named_call_is_begun_in_the_prompt(gateway: World) -> None:
    """It is recorded as environment, parsed with what was sampled, and continued when sent back."""
    gateway.say(REST, "It is 3.")
    choice: Any = {"type": "function", "function": {"name": "add"}}
    async with gateway.openai() as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL, messages=ASK, tools=[ADD, SUB], tool_choice=choice
        )
        first = raw.parse()
        message = first.choices[0].message
        assert raw.headers["seamflow-tool-choice"] == "valid"
        assert prompt_text(gateway).endswith('<assistant><tool_call>{"name": "add", "arguments":')
        calls: Any = message.tool_calls
        assert json.loads(calls[0].function.arguments) == ARGUMENTS
        assert first.choices[0].finish_reason == "tool_calls"
        again: Any = [*ASK, message, {"role": "tool", "tool_call_id": calls[0].id, "content": "3"}]
        await client.chat.completions.create(model=MODEL, messages=again, tools=[ADD, SUB])
    await continued(gateway)
    turn = next(iter((await gateway.recorded()).values()))
    environment, policy = turn.tokens.spans
    assert environment.origin == tokens_pb2.ORIGIN_ENVIRONMENT
    ids = list(turn.tokens.token_ids)
    assert gateway.template.text(ids[: environment.num_tokens]).endswith('"arguments":')
    assert gateway.template.text(ids[policy.start :]) == REST + "<|end|>"


async def test_any_call_in_all_dialects(gateway: World) -> None:
    """Required, any: up to the tool's name; with one tool its name too. Also streamed."""
    gateway.say(f'sub", "arguments":{REST}', REST, REST)
    async with gateway.openai() as client:
        options: Any = {"model": MODEL, "messages": ASK, "tools": [ADD, SUB]}
        async with client.chat.completions.stream(**options, tool_choice="required") as stream:
            chat = await stream.get_final_completion()
        calls: Any = chat.choices[0].message.tool_calls
        assert (calls[0].function.name, chat.choices[0].message.content) == ("sub", "")
        tools: Any = [{"type": "function", **ADD["function"], "strict": False}]
        response = await client.responses.create(
            model=MODEL, input=ASK, tools=tools, tool_choice="required"
        )
        assert [item.type for item in response.output] == ["function_call"]
    async with gateway.anthropic() as other:
        tools = [{"name": "add", "input_schema": {"type": "object"}}]
        choice: Any = {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
        answer = await other.messages.create(
            model=MODEL, messages=ASK, tools=tools, tool_choice=choice, max_tokens=99
        )
    assert answer.stop_reason == "tool_use"


async def test_a_malformed_forced_call_is_content(gateway: World) -> None:
    """With what the prompt began; header and fields say so."""
    gateway.say("oops")
    async with gateway.openai() as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL, messages=ASK, tools=[ADD], tool_choice="required"
        )
    reply = raw.parse()
    assert reply.choices[0].message.content == '<tool_call>{"name": "add", "arguments":oops'
    assert raw.headers["seamflow-tool-choice"].startswith("invalid; ")
    fields: Any = (reply.model_extra or {})["seamflow"]
    assert fields["tool_choice"]["result"] == "invalid"


async def test_one_call_ends_the_turn(gateway: World) -> None:
    """Without parallel calls nothing after the first one is recorded."""
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    gateway.say(call + call, call + call)
    options: Any = {"model": MODEL, "messages": ASK, "tools": [ADD]}
    async with gateway.openai() as client:
        both = await client.chat.completions.create(**options)
        one = await client.chat.completions.create(**options, parallel_tool_calls=False)
    counts = [len(reply.choices[0].message.tool_calls or ()) for reply in (both, one)]
    assert counts == [2, 1]
    turn = list((await gateway.recorded()).values())[-1]
    assert gateway.template.text(turn.tokens.token_ids).endswith(call)


async def test_json_answers_begin_and_end_in_all_dialects(gateway: World) -> None:
    """The bracket is the prompt's; what would follow the value is not recorded."""
    gateway.say(*['"name": "Ulm", "size": 1} and more'] * 3)
    async with gateway.openai() as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL, messages=ASK, response_format=FORMAT
        )
        assert raw.headers["seamflow-schema"] == "valid"
        content = raw.parse().choices[0].message.content
        assert content is not None
        assert json.loads(content) == {"name": "Ulm", "size": 1}
        text: Any = {"format": {"type": "json_schema", "name": "city", "schema": CITY}}
        response = await client.responses.create(model=MODEL, input=ASK, text=text)
        assert json.loads(response.output_text)["name"] == "Ulm"
    async with gateway.anthropic() as other:
        config: Any = {"format": {"type": "json_schema", "schema": CITY}}
        answer: Any = await other.messages.create(
            model=MODEL, messages=ASK, max_tokens=99, output_config=config
        )
    assert json.loads(answer.content[0].text)["size"] == 1
    for turn in (await gateway.recorded()).values():
        assert gateway.template.text(turn.tokens.token_ids).endswith('"size": 1}')


@pytest.mark.parametrize(
    ("said", "header"),
    [
        ('"name": "Ulm"}', "invalid; $: 'size' is a required property"),
        ('"name": 3, "size": 1}', "invalid; $.name: 3 is not of type 'string'"),
        ("no JSON", "invalid; the content is no JSON: "),
    ],
)
async def test_invalid_json_is_told(gateway: World, said: str, header: str) -> None:
    """Status 200: clients check themselves."""
    gateway.say(said)
    async with gateway.openai() as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL, messages=ASK, response_format=FORMAT
        )
    assert raw.headers["seamflow-schema"].startswith(header)


async def test_with_tools_the_policy_may_call_one_instead(gateway: World) -> None:
    """Then nothing is begun for it, and the schema is not checked."""
    gateway.say(
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>', '{"name": "", "size": 2}'
    )
    options: Any = {"model": MODEL, "messages": ASK, "tools": [ADD], "response_format": FORMAT}
    async with gateway.openai() as client:
        create = client.chat.completions.with_raw_response.create
        headers = [(await create(**options)).headers["seamflow-schema"] for _ in range(2)]
    assert headers == ["unchecked; the answer is a tool call", "valid"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
            "response_format",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "string"}},
                }
            },
            "response_format",
        ),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
    ],
)
async def test_what_cannot_be_met_is_refused(
    gateway: World, fields: dict[str, Any], param: str
) -> None:
    async with gateway.openai() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=ASK, **fields)
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)


@pytest.mark.parametrize(("choice", "said"), [("auto", SAID), ("required", REST)])
async def test_item_references_are_read_from_the_record(
    gateway: World, choice: Any, said: str
) -> None:
    """Items by their ids alone, as clients of stored responses send them."""
    gateway.say(said, "It is 3.")
    tools: Any = [{"type": "function", **ADD["function"], "strict": False}]
    async with gateway.openai() as client:
        first = await client.responses.create(
            model=MODEL, input=ASK, tools=tools, tool_choice=choice
        )
        call: Any = first.output[-1]
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        items: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
        second = await client.responses.create(
            model=MODEL, input=[*ASK, *items, result], tools=tools
        )
        assert second.output_text == "It is 3."
        unknown: Any = [*ASK, {"type": "item_reference", "id": "msg_unknown"}]
        with pytest.raises(openai.NotFoundError, match="unknown"):
            await client.responses.create(model=MODEL, input=unknown, tools=tools)
    await continued(gateway)


async def test_results_follow_a_previous_response(gateway: World) -> None:
    """The usual loop of stored responses: only the tool's result is sent."""
    gateway.say(REST, "It is 3.")
    tools: Any = [{"type": "function", **ADD["function"], "strict": False}]
    async with gateway.openai() as client:
        first = await client.responses.create(
            model=MODEL, input=ASK, tools=tools, tool_choice="required"
        )
        call: Any = first.output[-1]
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        options: Any = {"previous_response_id": first.id, "tools": tools}
        second = await client.responses.create(model=MODEL, input=[result], **options)
        assert second.output_text == "It is 3."
        with pytest.raises(openai.BadRequestError, match="tools"):
            await client.responses.create(model=MODEL, input=[result], **{**options, "tools": []})
    begun = '<tool_call>{"name": "add", "arguments":'
    assert prompt_text(gateway).endswith(f"{begun}{REST}<|end|><tool>3<|end|><assistant>")
    await continued(gateway)


async def test_previous_responses_are_continued(gateway: World) -> None:
    """By the recorded tokens, with the new messages alone."""
    gateway.say("one", "two", "three")
    options: Any = {"model": MODEL, "instructions": "Count."}
    async with gateway.openai() as client:
        first = await client.responses.create(input="Go.", **options)
        second = await client.responses.create(
            input="On.", previous_response_id=first.id, **options
        )
        await client.responses.create(input="Go on.", previous_response_id=second.id, **options)
        text = prompt_text(gateway)
        for fields, raised in (
            ({"previous_response_id": "resp_no"}, openai.NotFoundError),
            ({"previous_response_id": first.id, "instructions": "?"}, openai.BadRequestError),
        ):
            with pytest.raises(raised):
                await client.responses.create(model=MODEL, input="!", **fields)
    whole = "<system>Count.<|end|><user>Go.<|end|><assistant>one<|end|><user>On.<|end|>"
    assert text == f"{whole}<assistant>two<|end|><user>Go on.<|end|><assistant>"
    turns = list((await gateway.recorded()).values())
    assert [turn.prefix_turn_id for turn in turns[1:3]] == [turns[0].turn_id, turns[1].turn_id]
