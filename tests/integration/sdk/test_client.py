"""A call survives a broken connection: no token lost, none doubled."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from seamflow import (
    BlockingClient,
    Check,
    Client,
    Drift,
    Rollout,
    SamplingParams,
    Turn,
    WeightSpan,
)
from seamflow.common.v1 import tokens_pb2
from seamflow.errors import InvalidRequestError, RunEndedError, SeamflowError
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.runner.agent_runner import TokenLog
from seamflow.trajectory.v1 import trajectory_pb2

from tests.lib.sdk.support import TOKENS, Gateway, serving


@asynccontextmanager
async def rollout_on(gateway: Gateway, **options: object) -> AsyncIterator[Rollout]:
    """A rollout that talks to this gateway."""
    async with (
        serving(gateway.added()) as address,
        Client(address, run_id="run", **options) as client,  # type: ignore[arg-type]
    ):
        yield await client.start_rollout("r")


def named(finish: pb.FinishRolloutRequest) -> list[tuple[str, float, str]]:
    """Its rewards."""
    return [(r.name, r.value, r.turn_id) for r in finish.rewards.rewards]


async def answer(gateway: Gateway) -> Turn:
    """One turn from this gateway."""
    async with rollout_on(gateway) as rollout, asyncio.timeout(10):
        return await rollout.generate([{"role": "user", "content": "hi"}], turn_id="t")


async def test_a_turn_holds_what_was_sampled() -> None:
    """Ids, log-probs, spans, text and the end arrive as the gateway sent them."""
    turn = await answer(Gateway())
    assert turn.token_ids == TOKENS
    assert turn.logprobs == [-0.5 * i for i in TOKENS]
    assert (turn.text, turn.finish_reason, turn.num_prompt_tokens) == ("hello", "stop", 3)
    assert turn.drift is None


async def test_an_agent_that_does_not_look_on_gets_its_tokens_seldom() -> None:
    """One that does gets them as they are sampled; either may set another interval."""
    gateway = Gateway()
    async with rollout_on(gateway) as rollout:
        await rollout.generate(token_ids=[1])
        await rollout.generate(token_ids=[1], on_tokens=lambda tokens: None)
        await rollout.generate(token_ids=[1], chunk_seconds=0.25)
        await rollout.generate(token_ids=[1], chunk_seconds=0.5, on_tokens=lambda tokens: None)
    intervals = [request.chunk_interval for request in gateway.generated]
    assert [each.ToTimedelta().total_seconds() for each in intervals] == [1.0, 0.0, 0.25, 0.5]
    assert [request.stream_text for request in gateway.generated] == [False, True, False, True]


async def test_a_turn_tells_of_drift() -> None:
    """An agent that re-tokenised what was sampled learns where, and both texts."""
    gateway = Gateway()
    gateway.drift = tokens_pb2.Drift(position=7, recorded_text="hel lo", retokenized_text="hello")
    turn = await answer(gateway)
    assert turn.drift == Drift(position=7, recorded_text="hel lo", retokenized_text="hello")


@pytest.mark.parametrize("breaks", [[0], [1], [5], [9], [2, 2, 7], [0, 3, 3, 3]])
@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED])
async def test_a_broken_stream_goes_on_where_it_broke(
    breaks: list[int], code: grpc.StatusCode
) -> None:
    """Each new call asks for the first token not yet seen, whoever broke the last one."""
    gateway = Gateway(breaks, code)
    turn = await answer(gateway)
    assert turn.token_ids == TOKENS
    # A stream that fails before its first element may be repeated by gRPC itself.
    assert [o for i, o in enumerate(gateway.offsets) if o not in gateway.offsets[:i]] == sorted(
        {0, *breaks}
    )


async def test_spans_count_from_the_first_sampled_token() -> None:
    """A turn that two servers made says which tokens are whose."""
    turn = await answer(Gateway([4]))
    first = WeightSpan(start=0, num_tokens=2, weight_version=1, server_id="server-1")
    assert turn.spans[0] == first
    assert [(s.start, s.weight_version) for s in turn.spans] == [
        (0, 1),
        (2, 1),
        (4, 2),
        (6, 2),
        (8, 2),
    ]


class ForgetsOffsets(Gateway):
    """A gateway that ignores the caller's offset, as a naive one would."""

    async def Generate(
        self, request: pb.GenerateRequest, context: object
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Always from the start."""
        request.resume_from_offset = 0
        async for event in super().Generate(request, context):
            yield event


async def test_doubled_tokens_are_refused() -> None:
    """A gateway that sends tokens again breaks its contract, and the client says so."""
    with pytest.raises(SeamflowError, match="expected 4"):
        await answer(ForgetsOffsets([4]))


async def test_a_client_that_ignores_offsets_would_double_tokens() -> None:
    """Negative control: the same broken stream, read again from the start, doubles 4 tokens."""
    received: list[int] = []
    gateway = ForgetsOffsets([4])

    def observer(rollout_id: str, turn_id: str, chunk: pb.TokenChunk) -> None:
        received.extend(chunk.tokens.token_ids)
        chunk.offset = len(received) - len(chunk.tokens.token_ids)  # hide what the client checks

    async with rollout_on(gateway, observer=observer) as rollout:
        turn = await rollout.generate(token_ids=[1])
    assert turn.token_ids == TOKENS[:4] + TOKENS


async def test_a_refusal_is_raised() -> None:
    """What no retry can cure reaches the caller."""
    with pytest.raises(InvalidRequestError):
        await answer(Gateway([2], grpc.StatusCode.INVALID_ARGUMENT))


async def test_a_turn_has_a_deadline() -> None:
    """A gateway that stays away does not hold the agent for ever."""
    async with Client("127.0.0.1:1", run_id="run") as client:
        rollout = client.rollout("r", "")
        with pytest.raises(TimeoutError):
            await rollout.generate(token_ids=[1], timeout=0.2)


async def test_a_rollout_closes_with_rewards_or_with_a_failure() -> None:
    """One number is the reward; several carry names; a failure has a class and no reward."""
    gateway = Gateway()
    async with rollout_on(gateway) as rollout:
        await rollout.finish(0.5)
        await rollout.finish({"reward": 1, "length": 3})
        await rollout.fail(tokens_pb2.FAILURE_CLASS_ENVIRONMENT, "no browser")
    one, two, failed = gateway.finished
    assert named(one) == [("reward", 0.5, "")]
    assert named(two) == [("reward", 1.0, ""), ("length", 3.0, "")]
    assert (failed.WhichOneof("outcome"), failed.failure.message) == ("failure", "no browser")
    assert set(gateway.credentials) == {"credential of r"}


async def test_turns_have_rewards_of_their_own_or_are_left_out() -> None:
    """A discarded branch is named when it is generated, or at the end."""
    gateway = Gateway()
    async with rollout_on(gateway) as rollout:
        await rollout.generate(token_ids=[1], turn_id="a", train=False)
        await rollout.generate(token_ids=[1], turn_id="b")
        await rollout.finish(1.0, turn_rewards={"b": 0.5}, untrained_turn_ids=["c"])
    (finish,) = gateway.finished
    assert named(finish) == [("reward", 1.0, ""), ("reward", 0.5, "b")]
    assert list(finish.untrained_turn_ids) == ["a", "c"]


async def test_messages_and_tools_reach_the_gateway_and_come_back() -> None:
    """In the form of OpenAI's chat API; the answer can be appended to the messages."""
    gateway = Gateway()
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    gateway.answer = pb.Message(
        role="assistant",
        reasoning="hm",
        tool_calls=[pb.ToolCall(id="c1", name="add", arguments_json='{"a": 1}')],
    )
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    question = {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]}
    async with rollout_on(gateway) as rollout:
        turn = await rollout.generate(
            [question], SamplingParams(stop=["x"]), tools=[tool], template_arguments={"think": 1}
        )
        assert (turn.text, turn.reasoning, turn.tool_calls) == ("", "hm", [call])
        answer = {"role": "tool", "content": "2", "tool_call_id": "c1"}
        await rollout.generate([question, turn.message, answer], tools=[tool])
    first, second = (request.messages for request in gateway.generated)
    assert (first.tools[0].name, first.tools[0].parameters_json) == ("add", '{"type": "object"}')
    assert first.template_arguments_json == '{"think": 1}'
    assert list(gateway.generated[0].sampling.stop) == ["x"]
    assert second.messages[1] == gateway.answer
    assert second.messages[2].tool_call_id == "c1"
    assert (turn.prefix_turn_id, turn.prefix_length, turn.stop) == ("before", 2, "<end>")


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"tool_choice": "required"}, pb.ToolChoice(required=True)),
        ({"tool_choice": {"name": "add"}}, pb.ToolChoice(name="add")),
        (
            {"tool_choice": {"type": "function", "function": {"name": "add"}}},
            pb.ToolChoice(name="add"),
        ),
        ({"parallel_tool_calls": False}, pb.ToolChoice(one_call=True)),
        ({}, pb.ToolChoice()),
    ],
)
async def test_tool_choices_reach_the_gateway(given: dict[str, Any], sent: pb.ToolChoice) -> None:
    """In the forms of OpenAI's chat API."""
    gateway = Gateway()
    async with rollout_on(gateway) as rollout:
        await rollout.generate([{"role": "user", "content": "hi"}], **given)
    (request,) = gateway.generated
    assert request.tool_choice == sent
    assert request.HasField("tool_choice") == bool(given)


async def test_schemas_and_recorded_answers_reach_the_gateway() -> None:
    gateway, schema = Gateway(), {"type": "object"}
    recorded: dict[str, Any] = {"turn_id": "a", "content": True, "tool_calls": [1]}
    async with rollout_on(gateway) as rollout:
        answer = {"role": "assistant", "recorded": recorded}
        await rollout.generate([answer], response_schema=schema, after_turn_id="before")
        with pytest.raises(ValueError, match="tool_choice"):
            await rollout.generate([answer], tool_choice="some")
    (request,) = gateway.generated
    assert json.loads(request.response_schema_json) == schema
    assert request.messages.messages[0].recorded == pb.RecordedAnswer(**recorded)
    assert request.messages.after_turn_id == "before"


def test_checks_of_an_answer() -> None:
    """None where nothing was to be checked."""
    check = pb.AnswerCheck(result=pb.CHECK_RESULT_INVALID, reason="why")
    turn = Turn(turn_id="t")
    turn.end(pb.TurnEnd(opening="{", schema_check=check))
    assert turn.schema_check == Check(result="invalid", reason="why")
    assert (turn.opening, turn.tool_check) == ("{", None)


async def test_a_member_of_a_group_is_trained_without_a_leased_task() -> None:
    """It has the name that the gateway gave, and its lease is kept until it ends."""
    gateway = Gateway(lease_seconds=0.1)
    async with serving(gateway.added()) as address, Client(address, run_id="run") as client:
        rollout = await client.start_rollout("mine", group=("g", 4), labels={"env": "x"})
        assert rollout.rollout_id == "g/0/1"
        (request,) = gateway.started
        assert (request.group.group_id, request.group.size) == ("g", 4)
        assert dict(request.labels) == {"env": "x"}
        for _ in range(3):
            assert await gateway.extended.get() == ["g/0/1"]
        await rollout.finish(1.0)
        await asyncio.sleep(0.1)
        while not gateway.extended.empty():
            gateway.extended.get_nowait()
        await asyncio.sleep(0.2)
        assert gateway.extended.empty()


async def test_a_run_that_has_ended_is_said() -> None:
    """An agent stops, instead of asking for ever."""
    gateway = Gateway()
    gateway.ended = True
    async with serving(gateway.added()) as address, Client(address, run_id="run") as client:
        with pytest.raises(RunEndedError, match="run 'run' has ended"):
            await client.lease_rollouts()


async def test_run_and_model_can_be_asked() -> None:
    """What a client has to know before its first turn."""
    async with serving(Gateway().added()) as address, Client(address, run_id="run") as client:
        assert (await client.model()).vocabulary_size == 17
        assert (await client.run()).state == trajectory_pb2.RUN_STATE_RUNNING
        assert await client.tokenize("abc") == [0, 1, 2]
        assert await client.tokenize([{"role": "user", "content": "abc"}]) == [0]


async def test_the_blocking_client_does_the_same() -> None:
    """Lease, turn, reward, from a thread without an event loop; leases are kept meanwhile."""
    gateway = Gateway([4], payloads=['{"x": 1}'], lease_seconds=0.1)

    def agent(address: str) -> list[int]:
        with BlockingClient(address, run_id="run") as client:
            (rollout,) = client.lease_rollouts()
            assert rollout.task is not None
            assert rollout.task.payload == {"x": 1}
            turn = rollout.generate([{"role": "user", "content": "hi"}])
            time.sleep(0.3)
            assert not rollout.is_lost
            rollout.finish(1.0)
            return list(turn.token_ids)

    async with serving(gateway.added()) as address:
        assert await asyncio.to_thread(agent, address) == TOKENS
    assert gateway.extended.qsize() > 1
    assert gateway.finished[0].rollout_id == "rollout-0"


async def test_the_observer_sees_each_chunk_before_the_agent() -> None:
    """What was received is on record even where the agent fails on it."""
    seen: list[tuple[str, str, int]] = []

    def fail(_: pb.TokenChunk) -> None:
        raise KeyError("agent")

    def observer(rollout_id: str, turn_id: str, chunk: pb.TokenChunk) -> None:
        seen.append((rollout_id, turn_id, chunk.offset))

    async with rollout_on(Gateway(), observer=observer) as rollout:
        with pytest.raises(KeyError):
            await rollout.generate(token_ids=[1], turn_id="t", on_tokens=fail)
    assert seen == [("r", "t", 0)]


async def test_the_token_log_holds_every_chunk_once(tmp_path: Path) -> None:
    """One JSON line per chunk, over a broken stream and from two logs on one file."""
    path = tmp_path / "tokens.jsonl"
    with TokenLog(path) as first, TokenLog(path) as second:
        for log in (first, second):
            async with rollout_on(Gateway([4]), observer=log.write) as rollout:
                await rollout.generate(token_ids=[1], turn_id="t")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [token for line in lines for token in line["token_ids"]] == TOKENS * 2
    assert lines[0] == {
        "rollout_id": "r",
        "turn_id": "t",
        "offset": 0,
        "token_ids": TOKENS[:2],
        "logprobs": [-3.5, -4.0],
        "spans": [[0, 2, 1, "server-1"]],
    }
