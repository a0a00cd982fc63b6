"""Agents lease, extend and finish their work at the gateway, with a credential for each rollout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from seamflow.common.v1 import tokens_pb2
from seamflow.errors import ExhaustedError, decode
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.trajectory.v1 import run_service_pb2 as run_pb
from seamflow.trajectory.v1 import trajectory_pb2

from bench.harness.byte_model import make_byte_model
from rollout.gateway import leases
from tests.lib.rollout.gateway.support import ScriptedServer, bearer, gateway, message, scripted
from tests.lib.trajectory_manager.client import RULES
from tests.lib.trajectory_manager.memory.store import memory_store
from trajectory_manager.model.records import Purpose, Task
from trajectory_manager.store.redis.connect import Store

if TYPE_CHECKING:
    from seamflow.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub
    from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceAsyncStub

ONE = tokens_pb2.Rewards(rewards=[tokens_pb2.Reward(name="reward", value=1.0)])


@dataclass(slots=True)
class World:
    """An agent at the gateway, and the manager's store behind it."""

    stub: RolloutServiceAsyncStub
    runs: RunServiceAsyncStub
    store: Store
    server: ScriptedServer

    async def submit(self, *names: str, purpose: Purpose = Purpose.TRAIN) -> None:
        """Queue tasks of two rollouts each."""
        tasks = [
            Task(task_id=name, payload_json='{"x": 1}', num_samples=2, purpose=purpose)
            for name in names
        ]
        await self.store.runs.submit("run", tasks, 100)

    async def lease(self, request_id: str = "one", **fields: Any) -> pb.LeaseRolloutsResponse:
        """LeaseRollouts without a wait."""
        request = pb.LeaseRolloutsRequest(run_id="run", request_id=request_id, **fields)
        return await self.stub.LeaseRollouts(request)

    async def member(self, name: str, size: int = 2, group: str = "g") -> pb.StartRolloutResponse:
        """A rollout of the agent's own group."""
        request = pb.StartRolloutRequest(
            run_id="run",
            rollout_id=name,
            purpose=tokens_pb2.PURPOSE_TRAIN,
            group=pb.Group(group_id=group, size=size),
            labels={"kind": "own"},
        )
        return await self.stub.StartRollout(request)

    async def generate(
        self, rollout_id: str, credential: str, turn_id: str = "t"
    ) -> list[pb.GenerateResponse]:
        """One turn."""
        request = pb.GenerateRequest(
            run_id="run",
            rollout_id=rollout_id,
            turn_id=turn_id,
            messages=pb.Messages(messages=[message("user", "hi")]),
        )
        call = self.stub.Generate(request, metadata=bearer(credential))
        return [event async for event in call]

    async def finish(self, rollout_id: str, credential: str, **fields: Any) -> None:
        """FinishRollout."""
        request = pb.FinishRolloutRequest(run_id="run", rollout_id=rollout_id, **fields)
        await self.stub.FinishRollout(request, metadata=bearer(credential))

    async def extend(self, *names: tuple[str, str]) -> pb.ExtendRolloutsResponse:
        """ExtendRollouts of (rollout_id, credential)."""
        held = [pb.RolloutCredential(rollout_id=name, credential=secret) for name, secret in names]
        return await self.stub.ExtendRollouts(pb.ExtendRolloutsRequest(run_id="run", rollouts=held))

    async def num_ready(self) -> int:
        """Groups that are ready for the trainer."""
        return (await self.store.runs.run_counts("run")).num_ready_groups


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """Everything over real gRPC, in this process; the run trains one group of two in a step."""
    server, store = ScriptedServer(), memory_store()
    server.answers = [[[7]] for _ in range(20)]
    rules = trajectory_pb2.RunConfig(reward_name="reward")
    rules.MergeFrom(RULES)
    async with (
        scripted(server) as address,
        gateway(make_byte_model(tmp_path), kept=store, servers=(address,)) as (stub, _, runs),
    ):
        await runs.CreateRun(run_pb.CreateRunRequest(run_id="run", config=rules))
        yield World(stub, runs, store, server)


async def test_a_task_becomes_a_trained_group_at_one_address(world: World) -> None:
    """Lease, turn and reward of both rollouts; then the group is ready for the trainer."""
    await world.submit("task")
    leased = (await world.lease(max_rollouts=8)).leases
    assert [lease.rollout_id for lease in leased] == ["task/0/1", "task/1/1"]
    for lease in leased:
        assert (lease.task.task_id, lease.task.payload_json) == ("task", '{"x": 1}')
        assert lease.lease_duration == Duration(seconds=60)
        assert (await world.generate(lease.rollout_id, lease.credential))[-1].HasField("end")
        await world.finish(lease.rollout_id, lease.credential, rewards=ONE)
    assert await world.num_ready() == 1


async def test_a_repeated_lease_returns_the_same_rollouts(world: World) -> None:
    """Its first answer may be lost; another request gets the next ones."""
    await world.submit("task")
    first = (await world.lease("one")).leases
    again = (await world.lease("one")).leases
    other = (await world.lease("two")).leases
    assert [(x.rollout_id, x.credential) for x in again] == [
        (x.rollout_id, x.credential) for x in first
    ]
    assert [lease.rollout_id for lease in other] == ["task/1/1"]


async def test_an_empty_lease_says_why(world: World) -> None:
    """Nothing is queued; admission is closed; the run has ended."""
    assert (await world.lease("a")).empty_reason == trajectory_pb2.EMPTY_REASON_NOTHING_QUEUED
    await world.submit("one", "two", "three")
    await world.lease("b", max_rollouts=8)
    closed = await world.lease("c")
    assert closed.empty_reason == trajectory_pb2.EMPTY_REASON_ADMISSION_CLOSED
    await world.runs.EndRun(run_pb.EndRunRequest(run_id="run"))
    assert (await world.lease("d")).empty_reason == trajectory_pb2.EMPTY_REASON_RUN_ENDED
    run = (await world.stub.GetRun(pb.GetRunRequest(run_id="run"))).run
    assert run.state == trajectory_pb2.RUN_STATE_ENDED


async def test_a_credential_opens_its_own_rollout_and_nothing_else(world: World) -> None:
    """Not another rollout's turns, record or end, and no lease that it does not prove."""
    await world.submit("task")
    mine, other = (await world.lease(max_rollouts=8)).leases
    for call in (
        world.generate(other.rollout_id, mine.credential),
        world.finish(other.rollout_id, mine.credential, rewards=ONE),
        world.extend((other.rollout_id, mine.credential)),
        world.stub.GetRollout(
            pb.GetRolloutRequest(run_id="run", rollout_id=other.rollout_id),
            metadata=bearer(mine.credential),
        ),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    forged = await world.extend((other.rollout_id, "forged"), (mine.rollout_id, mine.credential))
    assert list(forged.lost_rollout_ids) == [other.rollout_id]


@pytest.mark.parametrize("metadata", [(), (("authorization", "Basic x"),)], ids=["none", "other"])
async def test_without_a_credential_a_rollout_is_closed(world: World, metadata: Any) -> None:
    """UNAUTHENTICATED, and how to show one."""
    await world.submit("task")
    (lease,) = (await world.lease()).leases
    finish = pb.FinishRolloutRequest(run_id="run", rollout_id=lease.rollout_id, rewards=ONE)
    with pytest.raises(grpc.aio.AioRpcError, match="Bearer <credential>") as caught:
        await world.stub.FinishRollout(finish, metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_leases_are_extended_until_their_rollout_ends(world: World) -> None:
    """The answer names those that are lost, also one that never had a lease."""
    await world.submit("task")
    (lease,) = (await world.lease()).leases
    name = (lease.rollout_id, lease.credential)
    kept = await world.extend(name)
    assert (list(kept.lost_rollout_ids), kept.lease_duration) == ([], Duration(seconds=60))
    await world.finish(*name, rewards=ONE)
    assert list((await world.extend(name)).lost_rollout_ids) == [lease.rollout_id]


async def test_a_group_of_the_agents_own_is_trained(world: World) -> None:
    """Without any task in the queue; a failed member is replaced by the agent itself."""
    first = await world.member("a")
    await world.generate(first.rollout_id, first.credential)
    await world.finish(first.rollout_id, first.credential, rewards=ONE)
    second = await world.member("b")
    broken = tokens_pb2.Failure(
        failure_class=tokens_pb2.FAILURE_CLASS_ENVIRONMENT, message="no browser"
    )
    await world.finish(second.rollout_id, second.credential, failure=broken)
    # Nobody else gets the open place of the group.
    assert not (await world.lease()).leases
    third = await world.member("c")
    assert third.rollout_id == "g/1/2"
    await world.generate(third.rollout_id, third.credential)
    assert await world.num_ready() == 0
    await world.finish(third.rollout_id, third.credential, rewards=ONE)
    assert await world.num_ready() == 1
    record = await world.stub.GetRollout(
        pb.GetRolloutRequest(run_id="run", rollout_id=third.rollout_id),
        metadata=bearer(third.credential),
    )
    assert dict(record.trajectory.labels) == {"kind": "own"}
    assert record.trajectory.group_id == "g"


async def test_a_member_may_be_started_again(world: World) -> None:
    """The same name gets the same rollout, its credential too."""
    assert await world.member("a") == await world.member("a")
    assert (await world.member("b")).rollout_id == "g/1/1"


async def test_a_full_group_takes_no_more(world: World) -> None:
    """And a group does not change its size."""
    await world.member("a", size=1)
    with pytest.raises(grpc.aio.AioRpcError) as full:
        await world.member("b", size=1)
    assert (full.value.code(), decode(full.value).reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "GROUP_FULL",
    )
    with pytest.raises(grpc.aio.AioRpcError) as other:
        await world.member("c", size=3)
    assert other.value.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_admission_holds_own_groups_back_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RESOURCE_EXHAUSTED with a time to retry, until the trainer has caught up."""
    monkeypatch.setattr(leases, "_GROUP_WAIT", Duration(nanos=50_000_000))
    for name in ("one", "two"):
        await world.member(name, group=name)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await world.member("three", group="three")
    refusal = decode(caught.value)
    assert isinstance(refusal, ExhaustedError)
    assert refusal.retry_after


@pytest.mark.parametrize(
    ("rewards", "field"),
    [
        (tokens_pb2.Rewards(rewards=[tokens_pb2.Reward(name="other", value=1)]), "reward"),
        (tokens_pb2.Rewards(), "reward"),
        (
            tokens_pb2.Rewards(
                rewards=[tokens_pb2.Reward(name="reward", value=1, turn_id="nowhere")]
            ),
            "nowhere",
        ),
    ],
    ids=["another name", "none", "another turn"],
)
async def test_what_the_trainer_would_refuse_is_refused_at_the_door(
    world: World, rewards: tokens_pb2.Rewards, field: str
) -> None:
    """With the field at fault in the details, through the gateway; the rollout goes on."""
    await world.submit("task")
    (lease,) = (await world.lease()).leases
    await world.generate(lease.rollout_id, lease.credential)
    with pytest.raises(grpc.aio.AioRpcError, match=field) as caught:
        await world.finish(lease.rollout_id, lease.credential, rewards=rewards)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    (violation,) = decode(caught.value).violations
    assert violation.field.startswith("rewards")
    await world.finish(lease.rollout_id, lease.credential, rewards=ONE)


async def test_the_model_can_be_asked(world: World) -> None:
    """Vocabulary, template and stop ids; a text or messages are encoded as Generate would."""
    await world.server.known()
    model = await world.stub.GetModel(pb.GetModelRequest(run_id="run"))
    assert model.chat_template
    assert model.vocabulary_size > max(model.stop_token_ids)
    given = pb.Messages(messages=[message("user", "hi")])
    encoded = await world.stub.Tokenize(pb.TokenizeRequest(run_id="run", messages=given))
    start = pb.StartRolloutRequest(run_id="run", rollout_id="r", purpose=tokens_pb2.PURPOSE_EVAL)
    await world.generate("r", (await world.stub.StartRollout(start)).credential)
    assert list(encoded.token_ids) == world.server.prompts[0]
    text = await world.stub.Tokenize(pb.TokenizeRequest(run_id="run", text=encoded.text))
    assert text.token_ids == encoded.token_ids
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await world.stub.GetModel(pb.GetModelRequest(run_id="other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_lease_waits_for_a_task(world: World) -> None:
    """Long poll."""
    waiting = asyncio.create_task(world.lease(wait=Duration(seconds=20)))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await world.submit("task")
    assert len((await waiting).leases) == 1


async def test_with_tokens_a_credential_is_enough_for_its_rollout_and_for_no_more(
    tmp_path: Path,
) -> None:
    """The agents' token leases and starts; inside a rollout its credential alone opens."""
    server, store = ScriptedServer(), memory_store()
    server.answers = [[[7]]]
    tokens = {"token": "service", "agent_token": "agent", "operator_token": "operator"}
    model = make_byte_model(tmp_path)
    async with (
        scripted(server) as address,
        gateway(model, kept=store, servers=(address,), **tokens) as (stub, _, runs),
    ):
        await runs.CreateRun(run_pb.CreateRunRequest(run_id="run", config=RULES))
        world = World(stub, runs, store, server)
        await world.submit("task")
        lease = pb.LeaseRolloutsRequest(run_id="run", request_id="one")
        (mine,) = (await stub.LeaseRollouts(lease, metadata=bearer("agent"))).leases
        run = pb.GetRunRequest(run_id="run")
        finish = pb.FinishRolloutRequest(run_id="run", rollout_id=mine.rollout_id, rewards=ONE)
        secret = pb.RolloutCredential(rollout_id=mine.rollout_id, credential=mine.credential)
        extend = pb.ExtendRolloutsRequest(run_id="run", rollouts=[secret])
        for call in (
            stub.LeaseRollouts(lease, metadata=bearer(mine.credential)),
            stub.GetRun(run, metadata=bearer(mine.credential)),
            stub.LeaseRollouts(lease),
            stub.ExtendRollouts(extend),
            stub.FinishRollout(finish),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        for token in tokens.values():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.FinishRollout(finish, metadata=bearer(token))
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert (await world.generate(mine.rollout_id, mine.credential))[-1].HasField("end")
        kept = await stub.ExtendRollouts(extend, metadata=bearer(mine.credential))
        assert not kept.lost_rollout_ids
        await stub.FinishRollout(finish, metadata=bearer(mine.credential))
        # It ends with its rollout.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await world.generate(mine.rollout_id, mine.credential, turn_id="later")
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        kept = await stub.ExtendRollouts(extend, metadata=bearer(mine.credential))
        assert list(kept.lost_rollout_ids) == [mine.rollout_id]
