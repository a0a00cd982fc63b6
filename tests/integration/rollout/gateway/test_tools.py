"""Tool calls, reasoning and stop strings through a gateway: the record continues as sampled."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_service_pb2 as pb

from bench.harness.byte_model import END, make_byte_model
from rollout.gateway.prompt.chat_template import ChatTemplate
from tests.integration.rollout.gateway.test_turn import STOP, World
from tests.lib.rollout.gateway.support import FORGETFUL, ScriptedServer, gateway, message, scripted
from tests.lib.rollout.gateway.tools import ADD, ARGUMENTS, SAID, TOOLS

QUESTION = message("user", "1 + 2?")
RESULT = pb.Message(
    role="tool", content=[pb.ContentPart(type="text", text="3")], tool_call_id="mine"
)


def echoed(arguments: dict[str, int] = ARGUMENTS, **fields: Any) -> pb.Message:
    """The answer as a client sends it back: its own id, other order, without reasoning."""
    call = pb.ToolCall(id="mine", name="add", arguments_json=json.dumps(arguments))
    part = pb.ContentPart(type="text", text="Sure.")
    return pb.Message(role="assistant", content=[part], tool_calls=[call], **fields)


def prompt(*messages: pb.Message, tool: pb.Tool = ADD) -> pb.Messages:
    """A prompt with one tool."""
    return pb.Messages(messages=messages, tools=[tool])


@pytest.fixture(params=[(TOOLS, {})], ids=["tools"])
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Everything over real gRPC, in this process."""
    template, settings = request.param
    model, server = make_byte_model(tmp_path, template), ScriptedServer()
    async with (
        scripted(server) as address,
        gateway(model, servers=(address,), **settings) as (agent, store, runs),
    ):
        found = World(agent, store, runs, server, ChatTemplate(model))
        await found.start()
        yield found


async def ended(world: World, turn_id: str, given: pb.Messages, **fields: Any) -> pb.TurnEnd:
    """The end of a turn of these messages."""
    return (await world.generate(turn_id, given=given, **fields))[-1].end


async def first_turn(world: World) -> list[int]:
    """Sample the tool call letter by letter; the prompt and the answer."""
    answer = [*world.letters(SAID), *world.template.stop_token_ids]
    world.server.answers = [[answer], [world.ids("It is 3.")]]
    await ended(world, "t1", prompt(QUESTION))
    return [*world.server.prompts[0], *answer]


async def test_the_answer_is_parsed(world: World) -> None:
    """Into content, reasoning and tool calls; the tools are in the prompt."""
    world.server.answers = [[[*world.ids(SAID), *world.template.stop_token_ids]]]
    end = await ended(world, "t1", prompt(QUESTION))
    assert [(p.type, p.text) for p in end.message.content] == [("text", "Sure.")]
    assert (end.message.reasoning, end.parse_error) == ("hm", "")
    (call,) = end.message.tool_calls
    assert (call.name, json.loads(call.arguments_json), bool(call.id)) == ("add", ARGUMENTS, True)
    assert end.raw_text == SAID + END
    rendered = world.template.text(world.server.prompts[0])
    assert '"name": "add"' in rendered
    assert rendered.endswith("1 + 2?<|end|><assistant>")


@pytest.mark.parametrize("reasoning", ["", "hm"], ids=["dropped", "kept"])
async def test_an_echoed_call_continues_the_record(world: World, reasoning: str) -> None:
    """Recorded ids are used as they were sampled; only what follows them is encoded."""
    recorded = await first_turn(world)
    given = prompt(QUESTION, echoed(reasoning=reasoning), RESULT)
    end = await ended(world, "t2", given)
    assert (end.prefix_turn_id, end.prefix_length) == ("t1", len(recorded))
    assert world.server.prompts[1] == [*recorded, *world.ids("<tool>3<|end|><assistant>")]
    assert (await world.recorded())["t2"].prefix_turn_id == "t1"


@pytest.mark.parametrize(
    "given",
    [
        prompt(QUESTION, echoed({"a": 1, "b": 3}), RESULT),
        prompt(QUESTION, echoed(reasoning="ah"), RESULT),
        prompt(QUESTION, echoed(), RESULT, tool=pb.Tool(name="add", description="other")),
        prompt(message("user", "1 + 3?"), echoed(), RESULT),
    ],
    ids=["other arguments", "other reasoning", "other tools", "other question"],
)
async def test_a_changed_history_is_a_root_and_says_so(world: World, given: pb.Messages) -> None:
    """Negative control: what the policy did not say is never taken for what it did."""
    await first_turn(world)
    end = await ended(world, "t2", given)
    assert (end.prefix_turn_id, end.prefix_length) == ("", 0)


@pytest.mark.parametrize(
    ("world", "kept"),
    [((FORGETFUL, {"history": "as_sampled"}), 1), ((FORGETFUL, {}), 0)],
    ids=["as_sampled", "as_template"],
    indirect=["world"],
)
async def test_a_rewriting_template_is_followed_or_not(world: World, kept: int) -> None:
    """Setting `history` says whether recorded tokens stay that the template would drop."""
    answer = [*world.ids("so/four"), *world.template.stop_token_ids]
    world.server.answers = [[answer], [world.ids("yes")]]
    await ended(world, "t1", pb.Messages(messages=[QUESTION]))
    history = [QUESTION, message("assistant", "so/four"), message("user", "sure?")]
    end = await ended(world, "t2", pb.Messages(messages=history))
    assert world.template.text(world.server.prompts[1]).count("so/") == kept
    recorded = len(world.server.prompts[0]) + len(answer)
    assert (end.prefix_length == recorded) == bool(kept)


STRICT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if m.content != 'bad' else "
    "raise_exception('no bad words') }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Refuses some messages, as Mistral's template does."""


@pytest.mark.parametrize(
    "world", [(STRICT, {"history": h}) for h in ("as_sampled", "as_template")], indirect=True
)
@pytest.mark.parametrize("question", ["1 + 2?", "other"], ids=["continued", "a root"])
async def test_a_message_that_the_template_refuses_is_an_invalid_argument(
    world: World, question: str
) -> None:
    """Also where only the rest of the prompt is rendered."""
    world.server.answers = [[[*world.ids("3"), *world.template.stop_token_ids]]]
    await ended(world, "t1", pb.Messages(messages=[QUESTION]))
    history = [message("user", question), message("assistant", "3"), message("user", "bad")]
    with pytest.raises(grpc.aio.AioRpcError, match="no bad words") as caught:
        await ended(world, "t2", pb.Messages(messages=history), stream_text=True)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_malformed_call_is_text(world: World) -> None:
    """Its agent can tell the policy what was wrong."""
    broken = '<tool_call>{"name": "add", </tool_call>'
    world.server.answers = [[[*world.ids(broken), *world.template.stop_token_ids]]]
    end = await ended(world, "t1", prompt(QUESTION))
    assert (end.message.content[0].text, len(end.message.tool_calls)) == (broken, 0)
    assert "JSON" in end.parse_error


BROKEN = '<think>hm</think>Sure, 数学.<tool_call>{"name": "add", </tool_call>'


@pytest.mark.parametrize("said", [SAID, BROKEN], ids=["a call", "a malformed call"])
async def test_parsed_text_is_streamed(world: World, said: str) -> None:
    """Content and reasoning as they come, each byte a chunk; the end has what is missing."""
    ids = world.letters(said)
    world.server.answers = [[[i] for i in (*ids, *world.template.stop_token_ids)]]
    events = await world.generate("t1", given=prompt(QUESTION), stream_text=True)
    message = events[-1].end.message
    content, reasoning = deltas(events)
    assert reasoning == message.reasoning == "hm"
    whole = "".join(part.text for part in message.content)
    assert whole.startswith(content)
    assert content == said[said.index("Sure") : said.index("<tool_call>")]
    # A repeat with a cursor goes on where the tokens before it ended.
    for received in (0, 5, 20, len(ids) - 3):
        again = await world.generate(
            "t1", given=prompt(QUESTION), offset=received, stream_text=True
        )
        before = [event for event in events if event.chunk.offset < received]
        first, second = deltas(before), deltas(again)
        assert (first[0] + second[0], first[1] + second[1]) == (content, reasoning)
        assert again[-1].end == events[-1].end


def deltas(events: list[pb.GenerateResponse]) -> tuple[str, str]:
    """Content and reasoning of all chunks."""
    chunks = [event.chunk for event in events]
    content = "".join(chunk.content_delta for chunk in chunks)
    return content, "".join(chunk.reasoning_delta for chunk in chunks)


async def test_parsed_text_is_sent_only_if_it_is_asked_for(world: World) -> None:
    """Parsing costs time."""
    world.server.answers = [[[*world.ids(SAID), *world.template.stop_token_ids]]]
    events = await world.generate("t1", given=prompt(QUESTION))
    assert deltas(events) == ("", "")


async def test_a_stop_string_ends_the_turn_at_its_last_token(world: World) -> None:
    """What was sampled after it is neither recorded nor sent, and a repeat says the same."""
    sampled = world.letters("say STOP now")
    world.server.answers = [[sampled[:6], sampled[6:10], sampled[10:]]]
    stop = tokens_pb2.SamplingParams(stop=["STOP"])
    given = pb.Messages(messages=[QUESTION])
    events = await world.generate("t1", given=given, sampling=stop, stream_text=True)
    sent = [i for event in events for i in event.chunk.tokens.token_ids]
    kept = world.letters("say STOP")
    assert sent == kept
    end = events[-1].end
    assert (end.finish_reason, end.stop, end.raw_text) == (STOP, "STOP", "say STOP")
    assert end.message.content[0].text == "say ", "as sampled"
    assert "".join(event.chunk.text for event in events) == "say STOP"
    turn = (await world.recorded())["t1"]
    assert list(turn.tokens.token_ids)[-len(kept) :] == kept
    assert await ended(world, "t1", given, sampling=stop) == end
    assert world.server.prompts == [world.server.prompts[0]]


@pytest.mark.parametrize("change", ["sampling", "prompt"])
async def test_a_repeated_turn_with_another_request_is_refused(world: World, change: str) -> None:
    """Its tokens would have been sampled under parameters that nobody asked for."""
    world.server.answers = [[world.ids("four")]]
    given = pb.Messages(messages=[QUESTION])
    await world.generate("t1", given=given)
    repeated: dict[str, Any] = {"given": given}
    if change == "sampling":
        repeated["sampling"] = tokens_pb2.SamplingParams(temperature=0.2)
    else:
        repeated["given"] = pb.Messages(messages=[message("user", "other")])
    with pytest.raises(grpc.aio.AioRpcError, match=change) as caught:
        await world.generate("t1", **repeated)
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    # Control: what equals the defaults is the same request.
    same = tokens_pb2.SamplingParams(temperature=1.0, max_new_tokens=256)
    assert (await ended(world, "t1", given, sampling=same)).raw_text == "four"
