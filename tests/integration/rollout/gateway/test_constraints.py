"""Forced calls, schemas and system messages over gRPC: what is recorded, resumed and refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.errors import InvalidRequestError, decode
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.rollout.v1.rollout_server_service_pb2 import GenerateTokensResponse

from bench.harness.byte_model import APPENDING, make_byte_model
from rollout.gateway.prompt.chat_template import ChatTemplate
from tests.integration.rollout.gateway.test_tools import QUESTION, prompt
from tests.integration.rollout.gateway.test_turn import World, said
from tests.lib.rollout.gateway.support import ScriptedServer, gateway, message, sampled, scripted
from tests.lib.rollout.gateway.tools import ADD, SAID, TOOLS
from tests.suites.roundtrips.recorded_gateway import RecordedGateway

OBJECT = '{"type": "object"}'
ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
) + APPENDING
FIRST_SYSTEM = (
    "{% for m in messages %}{% if loop.first or m.role != 'system' %}"
    "<{{ m.role }}>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SYSTEMS = [message("system", "One."), message("system", "Two.")]


@pytest.fixture(params=[TOOLS], ids=["tools"])
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Everything over real gRPC, in this process."""
    model, server = make_byte_model(tmp_path, request.param), ScriptedServer()
    async with (
        scripted(server) as address,
        gateway(model, servers=(address,)) as (agent, store, runs),
    ):
        found = World(agent, store, runs, server, ChatTemplate(model))
        await found.start()
        yield found


def say(world: World, text: str) -> None:
    """Script the next answer, one token in each element."""
    ids = [*world.letters(text), *world.template.stop_token_ids]
    world.server.answers.append([[i] for i in ids])


async def asked(world: World, turn_id: str, **fields: Any) -> pb.TurnEnd:
    """The end of a turn."""
    given = fields.pop("given", pb.Messages(messages=[QUESTION]))
    events = await world.generate(turn_id, given=given, **fields)
    return events[-1].end


async def refusal(world: World, **fields: Any) -> InvalidRequestError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asked(world, "refused", **fields)
    error = decode(caught.value)
    assert isinstance(error, InvalidRequestError)
    return error


async def test_json_ends_with_its_value(world: World) -> None:
    """A bracket in a string is none; the text of the chunks is that of the message."""
    say(world, '"a": "}", "b": [{}]} tail')
    fields: dict[str, Any] = {"response_schema_json": OBJECT, "stream_text": True}
    events = await world.generate("t", messages=[QUESTION], **fields)
    end = events[-1].end
    assert json.loads(said(end)) == {"a": "}", "b": [{}]}
    assert (end.opening, end.raw_text) == ("{", said(end)[1:])
    assert end.finish_reason == tokens_pb2.FINISH_REASON_STOP
    assert end.schema_check.result == pb.CHECK_RESULT_VALID
    assert "".join(event.chunk.content_delta for event in events) == said(end)
    turn = (await world.recorded())["t"]
    assert [s.num_tokens for s in turn.tokens.spans] == [end.num_prompt_tokens, len(end.raw_text)]


async def test_a_repeated_call_has_the_same_answer(world: World) -> None:
    """Nothing is sampled again, and with another opening it would be another turn."""
    say(world, '"a": 1}')
    first = await asked(world, "t", response_schema_json=OBJECT)
    assert await asked(world, "t", response_schema_json=OBJECT) == first
    assert len(world.server.prompts) == 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asked(world, "t", response_schema_json='{"type": "array"}')
    assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS


async def test_a_complete_value_ends_a_resumed_turn(tmp_path: Path) -> None:
    """Its gateway was killed after it had recorded the value's last token."""
    template = ChatTemplate(make_byte_model(tmp_path, TOOLS))
    recorded = RecordedGateway(template, "as_template")
    await recorded.start()
    given = pb.Messages(messages=[QUESTION])
    sampling = tokens_pb2.SamplingParams(max_new_tokens=99)
    fields: Any = {"response_schema_json": OBJECT, "sampling": sampling}
    for turn_id, text, has_ended in (("whole", '"a": 1}', True), ("part", '"a": 1', False)):
        record = await recorded.begin(turn_id, given, **fields)
        sent = sampled(template.encode_text(text))
        await record.append(GenerateTokensResponse(tokens=sent))
        again = await recorded.begin(turn_id, given, **fields)
        assert again.has_ended == has_ended


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tool_choice": pb.ToolChoice(required=True)}, "tool_choice"),
        ({"tool_choice": pb.ToolChoice(name="no"), "given": prompt(QUESTION)}, "tool_choice.name"),
        ({"response_schema_json": "{"}, "response_schema_json"),
        ({"response_schema_json": '{"type": "string"}'}, "response_schema_json"),
        ({"response_schema_json": '{"type": "object", "required": 1}'}, "response_schema_json"),
    ],
)
async def test_what_cannot_be_met_is_refused(
    world: World, fields: dict[str, Any], field: str
) -> None:
    error = await refusal(world, **fields)
    assert [violation.field for violation in error.violations] == [field]


async def test_a_prompt_of_ids_has_no_constraint(world: World) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="give messages"):
        await world.generate("t", world.ids("say "), response_schema_json=OBJECT)


@pytest.mark.parametrize("world", [APPENDING], indirect=True)
async def test_without_a_format_no_call_can_be_forced(world: World) -> None:
    """The error names the choice and the cure."""
    given = pb.Messages(messages=[QUESTION], tools=[ADD])
    error = await refusal(world, given=given, tool_choice=pb.ToolChoice(name="add"))
    assert "tool_choice is 'add'" in str(error)
    assert "response_format" in str(error)


NO_RESULTS = TOOLS.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
NO_CALLS = TOOLS.replace("m.tool_calls or []", "[]")
CALLED = pb.Message(role="assistant", tool_calls=[pb.ToolCall(name="add", arguments_json="{}")])
TOLD = message("tool", "3")


@pytest.mark.parametrize(
    ("world", "messages", "tools", "field"),
    [
        (APPENDING, [QUESTION], [ADD], "messages.tools"),
        (APPENDING, [QUESTION, CALLED, TOLD], [], "messages.messages[1].tool_calls"),
        (NO_CALLS, [QUESTION, CALLED, TOLD], [ADD], "messages.messages[1].tool_calls"),
        (NO_RESULTS, [QUESTION, CALLED, TOLD, QUESTION], [ADD], "messages.messages[2].role"),
    ],
    indirect=["world"],
)
async def test_what_the_template_leaves_out_is_refused(
    world: World, messages: list[pb.Message], tools: list[pb.Tool], field: str
) -> None:
    """Before anything is sampled or recorded; the rest is answered."""
    error = await refusal(world, given=pb.Messages(messages=messages, tools=tools))
    assert [violation.field for violation in error.violations] == [field]
    assert "does not render" in str(error)
    assert not world.server.prompts
    say(world, "hello")
    assert said(await asked(world, "t")) == "hello"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_last_message_of_the_assistant_is_continued(world: World, stream: bool) -> None:
    """As transformers' continue_final_message renders it; the agent gets what follows.

    The whole answer is what the next turn continues.
    """
    begun = message("assistant", "The sum is")
    say(world, " 3.")
    events = await world.generate(
        "t", given=pb.Messages(messages=[QUESTION, begun]), stream_text=stream
    )
    end = events[-1].end
    assert world.template.text(world.server.prompts[0]).endswith("<assistant>The sum is")
    assert said(end) == " 3."
    assert "".join(each.chunk.content_delta for each in events) == (" 3." if stream else "")
    say(world, "ok")
    whole = message("assistant", "The sum is 3.")
    after = await asked(world, "t2", given=pb.Messages(messages=[QUESTION, whole, QUESTION]))
    assert after.prefix_turn_id == "t"


@pytest.mark.parametrize(
    ("messages", "fields", "field"),
    [
        ([QUESTION, CALLED], {}, "messages.messages[1]"),
        ([QUESTION, message("assistant", "")], {}, "messages.messages[1]"),
        ([QUESTION, message("assistant", "a ")], {}, "messages.messages[1].content"),
        ([message("assistant", "a")], {}, "messages.messages[0]"),
        (
            [QUESTION, message("assistant", "a"), message("assistant", "b")],
            {},
            "messages.messages[2]",
        ),
        (
            [QUESTION, message("assistant", "a")],
            {"response_schema_json": OBJECT},
            "response_schema_json",
        ),
        (
            [QUESTION, message("assistant", "a")],
            {"tool_choice": pb.ToolChoice(required=True)},
            "tool_choice",
        ),
    ],
)
async def test_what_cannot_be_continued_is_refused(
    world: World, messages: list[pb.Message], fields: dict[str, Any], field: str
) -> None:
    """By name."""
    error = await refusal(world, given=pb.Messages(messages=messages), **fields)
    assert [violation.field for violation in error.violations] == [field]


@pytest.mark.parametrize("none", [True, False])
async def test_without_calls_the_tools_stay(world: World, none: bool) -> None:
    """The prompt continues the record, and a call is content; the control: it is parsed."""
    say(world, SAID)
    say(world, SAID)
    given = pb.Messages(messages=[QUESTION], tools=[ADD])
    first = await asked(world, "t1", given=given)
    given = pb.Messages(messages=[QUESTION, first.message, TOLD], tools=[ADD])
    choice = pb.ToolChoice(none=True) if none else None
    events = await world.generate("t2", given=given, tool_choice=choice, stream_text=True)
    end = events[-1].end
    assert (end.prefix_turn_id, bool(end.prefix_length)) == ("t1", True)
    assert bool(end.message.tool_calls) is not none
    assert ("<tool_call>" in said(end)) is none
    streamed = "".join(each.chunk.content_delta for each in events)
    assert said(end).startswith(streamed)
    assert ("<tool_call>" in streamed) is none
    say(world, "ok")
    given = pb.Messages(messages=[*given.messages, end.message, QUESTION], tools=[ADD])
    assert (await asked(world, "t3", given=given)).prefix_turn_id == "t2"


@pytest.mark.parametrize(
    ("world", "shown"),
    [
        (ONE_SYSTEM, "<system>One.\n\nTwo.<|end|>"),
        (FIRST_SYSTEM, "<system>One.\n\nTwo.<|end|>"),
        (APPENDING, "<system>One.<|end|><system>Two.<|end|>"),
    ],
    indirect=["world"],
    ids=["one", "first", "any"],
)
async def test_first_system_messages(world: World, shown: str) -> None:
    """One where the template takes one; the next turn continues the record."""
    say(world, "hello")
    say(world, "hello")
    first = await asked(world, "t1", given=pb.Messages(messages=[*SYSTEMS, QUESTION]))
    assert world.template.text(world.server.prompts[0]).startswith(f"{shown}<user>")
    later = [*SYSTEMS, QUESTION, first.message, message("user", "more")]
    second = await asked(world, "t2", given=pb.Messages(messages=later))
    assert second.prefix_turn_id == "t1"


@pytest.mark.parametrize("world", [ONE_SYSTEM, FIRST_SYSTEM], indirect=True, ids=["one", "first"])
async def test_a_later_system_message_is_not_left_out(world: World) -> None:
    later = pb.Messages(messages=[QUESTION, SYSTEMS[1], QUESTION])
    error = await refusal(world, given=later)
    assert "'Two.'" in str(error)


@pytest.mark.parametrize("world", [APPENDING], indirect=True, ids=["any"])
async def test_a_later_system_message_is_rendered(world: World) -> None:
    say(world, "hello")
    await asked(world, "t", given=pb.Messages(messages=[QUESTION, SYSTEMS[1], QUESTION]))
    assert "<system>Two.<|end|>" in world.template.text(world.server.prompts[0])
