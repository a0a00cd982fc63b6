"""A whole gateway in front of a scripted server and a real trajectory manager."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest
import structlog
from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.trajectory.v1 import run_service_pb2 as run_pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as store_pb

from bench.harness.byte_model import END, make_byte_model
from bench.harness.store_calls import send_async
from rollout.gateway import turn as turn_module
from rollout.gateway.credentials import digest
from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.gateway.record import packed_tokens
from services.lib.token_bytes import pack_ids
from tests.lib.rollout.gateway.support import (
    FORGETFUL,
    ScriptedServer,
    bearer,
    gateway,
    message,
    sampled,
    scripted,
)
from tests.lib.trajectory_manager.client import RULES

if TYPE_CHECKING:
    from seamflow.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub
    from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceAsyncStub
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

RUN = "run"
STOP = tokens_pb2.FINISH_REASON_STOP


@dataclass(slots=True)
class World:
    """An agent with one rollout, and what is behind its gateway."""

    gateway: RolloutServiceAsyncStub
    store: TrajectoryServiceAsyncStub
    runs: RunServiceAsyncStub
    server: ScriptedServer
    template: ChatTemplate
    credential: str = ""
    rollout_id: str = "r"

    async def start(self) -> None:
        """Open the run and the rollout."""
        await self.runs.CreateRun(run_pb.CreateRunRequest(run_id=RUN, config=RULES))
        request = pb.StartRolloutRequest(
            run_id=RUN, rollout_id=self.rollout_id, purpose=tokens_pb2.PURPOSE_EVAL
        )
        self.credential = (await self.gateway.StartRollout(request)).credential

    async def generate(
        self,
        turn_id: str,
        prompt: Sequence[int] = (),
        messages: Sequence[pb.Message] = (),
        offset: int = 0,
        *,
        given: pb.Messages | None = None,
        **fields: Any,
    ) -> list[pb.GenerateResponse]:
        """All events of a turn, from the sampled token at `offset` on."""
        request = pb.GenerateRequest(
            run_id=RUN,
            rollout_id=self.rollout_id,
            turn_id=turn_id,
            resume_from_offset=offset,
            **fields,
        )
        if given is not None:
            request.messages.CopyFrom(given)
        elif messages:
            request.messages.messages.extend(messages)
        else:
            request.token_ids.token_ids.extend(prompt)
        call = self.gateway.Generate(request, metadata=bearer(self.credential))
        return [event async for event in call]

    async def recorded(self) -> dict[str, trajectory_pb2.Turn]:
        """The turns as they are stored."""
        request = store_pb.GetTrajectoryRequest(run_id=RUN, rollout_id=self.rollout_id)
        trajectory = (await self.store.GetTrajectory(request)).trajectory
        return {turn.turn_id: turn for turn in trajectory.turns}

    def ids(self, text: str) -> list[int]:
        """The tokenizer's own ids of a text."""
        return self.template.encode_text(text)

    def letters(self, text: str) -> list[int]:
        """One id for each letter, unlike any tokenizer."""
        return [token_id for letter in text for token_id in self.ids(letter)]


def said(end: pb.TurnEnd) -> str:
    """The content of an answer."""
    return "".join(part.text for part in end.message.content)


@pytest.fixture(params=[None], ids=["appending"])
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Everything over real gRPC, in this process."""
    model = make_byte_model(tmp_path, *([request.param] if request.param else []))
    server = ScriptedServer()
    async with (
        scripted(server) as address,
        gateway(model, servers=(address,)) as (agent, store, runs),
    ):
        found = World(agent, store, runs, server, ChatTemplate(model))
        await found.start()
        yield found


async def test_the_last_tokens_close_their_turn(world: World) -> None:
    """What was forwarded is stored under its spans, and no call is made to end the turn."""
    answer = [*world.ids("hello"), *world.template.stop_token_ids]
    world.server.answers = [[answer[:1], answer[1:]]]
    events = await world.generate("t", world.ids("say "))
    chunks = [event.chunk for event in events if event.HasField("chunk")]
    assert [list(chunk.tokens.token_ids) for chunk in chunks] == [answer[:1], answer[1:]]
    finish = events[-1].end
    assert (finish.finish_reason, said(finish), finish.HasField("drift")) == (STOP, "hello", False)
    turn = (await world.recorded())["t"]
    assert list(turn.tokens.token_ids) == world.ids("say ") + answer
    assert list(turn.tokens.logprobs) == [0.0] * 4 + [-0.5] * 2
    assert [(s.start, s.num_tokens, s.server_id) for s in turn.tokens.spans] == [
        (0, 4, ""),
        (4, 2, "scripted"),
    ]
    assert turn.finish_reason == STOP


async def test_an_end_without_tokens_closes_the_turn(world: World) -> None:
    """A server may end the turn with a message without tokens."""
    world.server.answers = [[world.ids("hello"), []]]
    await world.generate("t", world.ids("say "))
    assert (await world.recorded())["t"].finish_reason == STOP


async def test_drift_is_reported_and_stored(world: World) -> None:
    """The agent, the record, the metric and the log learn of it; the log without any text."""
    answer = [*world.letters("hello"), *world.template.stop_token_ids]
    world.server.answers = [[answer], [world.ids("again")], []]
    await world.generate("t1", world.ids("say "))
    prompt = world.ids(f"say hello{END}more")
    before = turn_module._DRIFTED._value.get()
    with structlog.testing.capture_logs() as logs:
        finish = (await world.generate("t2", prompt))[-1].end
    expected = (4, f"hello{END}", f"hello{END}more")
    drift = finish.drift
    assert (drift.position, drift.recorded_text, drift.retokenized_text) == expected
    turn = (await world.recorded())["t2"]
    stored = turn.drift
    assert (stored.position, stored.recorded_text, stored.retokenized_text) == expected
    assert (turn.prefix_turn_id, turn.prefix_length) == ("t1", 4)
    assert turn.finish_reason == STOP
    assert world.server.prompts[1] == prompt
    assert turn_module._DRIFTED._value.get() == before + 1
    (line,) = [line for line in logs if line["event"] == "retokenization_drift"]
    assert (line["turn_id"], line["position"]) == ("t2", 4)
    assert "hell" not in str(line)
    again = (await world.generate("t2", prompt))[-1].end
    assert again == finish
    assert turn_module._DRIFTED._value.get() == before + 1


async def test_a_rewritten_answer_is_a_fork(world: World) -> None:
    """Negative control: another text from the same position on is not called drift."""
    world.server.answers = [[world.letters("hello")], [world.ids("again")]]
    await world.generate("t1", world.ids("say "))
    finish = (await world.generate("t2", world.ids("say hells bells")))[-1].end
    assert not finish.HasField("drift")
    turn = (await world.recorded())["t2"]
    assert not turn.HasField("drift")
    assert (turn.prefix_turn_id, turn.prefix_length) == ("t1", 4)


MESSAGES = [message("user", "say")]
MORE = [*MESSAGES, message("assistant", "hello"), message("user", "more")]


async def test_messages_do_not_drift(world: World) -> None:
    """Their recorded ids are used as they were sampled, whatever the tokenizer would give."""
    answer = [*world.letters("hello"), *world.template.stop_token_ids]
    world.server.answers = [[answer], [world.ids("again")]]
    await world.generate("t1", messages=MESSAGES)
    finish = (await world.generate("t2", messages=MORE))[-1].end
    assert not finish.HasField("drift")
    start = len(world.server.prompts[0])
    assert world.server.prompts[1][start : start + len(answer)] == answer


@pytest.mark.parametrize("world", [FORGETFUL], indirect=True)
async def test_messages_of_a_rewriting_template_may_drift(world: World) -> None:
    """Where the whole conversation is encoded again, it is compared like ids."""
    answer = [*world.letters("hello"), *world.template.stop_token_ids]
    world.server.answers = [[answer], [world.ids("yes")], [world.ids("so")]]
    forgotten = [*MORE[:2], message("user", "x/more")]
    later = [message("assistant", "yes"), message("user", "end")]
    await world.generate("t1", messages=MESSAGES)
    kept = (await world.generate("t2", messages=forgotten))[-1].end
    assert not kept.HasField("drift")
    drift = (await world.generate("t3", messages=[*forgotten, *later]))[-1].end.drift
    assert drift.position == len(world.server.prompts[0])
    assert drift.recorded_text == f"hello{END}"
    assert drift.retokenized_text.startswith(f"hello{END}<user>more{END}")


@pytest.mark.parametrize("drifts", [False, True])
async def test_a_turn_whose_writer_died_is_closed(world: World, drifts: bool) -> None:
    """All tokens were stored, its end was not: the next attempt closes it."""
    world.server.answers = [[world.letters("hello")]]
    await world.generate("t1", world.ids("say "))
    prompt = world.ids("say hello!" if drifts else "other")
    begin = store_pb.NewTurn(
        run_id=RUN,
        rollout_id="r",
        turn_id="t2",
        attempt_id="dead",
        token_ids=pack_ids(prompt),
        template_fingerprint=world.template.fingerprint,
        credential_digest=digest(world.credential),
    )
    begun = await send_async(world.store, begin)
    answer = [*world.ids("hello"), *world.template.stop_token_ids]
    new = prompt[len(begun.prefix_token_ids) // 4 :]
    own = packed_tokens.joined(packed_tokens.environment(new), sampled(answer))
    append = store_pb.TokenAppend(
        run_id=RUN,
        rollout_id="r",
        turn_id="t2",
        epoch=begun.epoch,
        tokens=own,
    )
    result = await world.store.AppendTokens(store_pb.AppendTokensRequest(appends=[append]))
    assert result.results[0].appended.num_tokens == packed_tokens.num_tokens(own)
    events = await world.generate("t2", prompt)
    assert list(events[0].chunk.tokens.token_ids) == answer
    assert events[-1].end.HasField("drift") == drifts
    turn = (await world.recorded())["t2"]
    assert (turn.finish_reason, turn.HasField("drift")) == (STOP, drifts)


async def test_tokens_lost_by_the_store_fail_the_rollout(world: World) -> None:
    """An agent with more tokens than the store gets an error; nothing is sampled again."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await world.generate("t", world.ids("say "), offset=3)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "has 3 sampled tokens, the store only 0" in str(caught.value.details())
    request = store_pb.GetTrajectoryRequest(run_id=RUN, rollout_id="r")
    lost = (await world.store.GetTrajectory(request)).trajectory
    assert lost.failure.failure_class == tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE
    assert world.server.prompts == []


async def test_without_the_comparison_lost_tokens_are_sampled_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: other tokens are stored where the caller has those that were lost."""

    async def unchecked(_: turn_module.Turn) -> None:
        pass

    monkeypatch.setattr(turn_module.Turn, "_check_nothing_lost", unchecked)
    world.server.answers = [[[*world.ids("hello"), *world.template.stop_token_ids]]]
    await world.generate("t", world.ids("say "), offset=3)
    assert len(world.server.prompts) == 1


@pytest.mark.parametrize("is_pinned", [True, False])
async def test_a_pinned_turn_never_has_tokens_of_another_version(
    world: World, is_pinned: bool
) -> None:
    """The server swapped since its report: what it sampled then is dropped, and sampled again.

    Negative control: without a pin the tokens of both versions are recorded.
    """
    request = pb.StartRolloutRequest(
        run_id=RUN,
        rollout_id="pinned",
        purpose=tokens_pb2.PURPOSE_EVAL,
        pinned_weight_version=3 if is_pinned else None,
    )
    credential = (await world.gateway.StartRollout(request)).credential
    world.server.weight_version = 3
    wrong, right = world.ids("no"), [*world.ids("yes"), *world.template.stop_token_ids]
    world.server.answers = [[[*wrong, *world.template.stop_token_ids]], [right]]
    world.server.sampled_versions = [4, 3]
    generate = pb.GenerateRequest(run_id=RUN, rollout_id="pinned", turn_id="t")
    generate.token_ids.token_ids.extend(world.ids("say "))
    call = world.gateway.Generate(generate, metadata=bearer(credential))
    events = [event async for event in call]
    assert said(events[-1].end) == ("yes" if is_pinned else "no")
    stored = store_pb.GetTrajectoryRequest(run_id=RUN, rollout_id="pinned")
    turn = (await world.store.GetTrajectory(stored)).trajectory.turns[0]
    assert turn.tokens.spans[-1].weight_version == (3 if is_pinned else 4)
    assert len(world.server.prompts) == (2 if is_pinned else 1)
