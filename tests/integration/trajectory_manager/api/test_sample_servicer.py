"""SampleService over real gRPC, on rollouts with real tokens."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from seamflow.common.v1 import tokens_pb2
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import sample_service_pb2 as pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1.sample_service_pb2_grpc import (
    SampleServiceStub,
    add_SampleServiceServicer_to_server,
)

from services.chassis.config.settings import ServerConfig
from services.chassis.rpc.server import Service, started
from services.lib.token_bytes import unpack_ids
from tests.lib.trajectory_manager.support import RULES, Run, failed, policy
from trajectory_manager.api.sample_servicer import SampleServicer
from trajectory_manager.model.records import Purpose, ReplayStrategy, StalenessPolicy
from trajectory_manager.model.runs import Replay
from trajectory_manager.service.long_poll import LongPoll
from trajectory_manager.store.redis.connect import Store

if TYPE_CHECKING:
    from seamflow.trajectory.v1.sample_service_pb2_grpc import SampleServiceAsyncStub


@dataclass(slots=True)
class Trainer:
    """A caller of SampleService, and the agents of its run."""

    stub: SampleServiceAsyncStub
    run: Run
    epoch: int = 0

    async def create(self, **changes: Any) -> None:
        """Create the run and lead it."""
        await self.run.store.runs.create_run(self.run.run_id, replace(RULES, **changes))
        request = pb.ReconcileRequest(run_id=self.run.run_id, trainer_id="trainer")
        self.epoch = (await self.stub.Reconcile(request)).epoch

    async def lease(self, step: int, **facts: Any) -> pb.LeaseSamplesResponse:
        """LeaseSamples."""
        request = pb.LeaseSamplesRequest(
            run_id=self.run.run_id, epoch=self.epoch, step=step, **facts
        )
        answer: pb.LeaseSamplesResponse = await self.stub.LeaseSamples(request)
        return answer

    async def awaits(self, step: int, base: int, wait: int = 0) -> int:
        """AwaitStep for one group; the number that are ready."""
        request = pb.AwaitStepRequest(
            run_id=self.run.run_id,
            epoch=self.epoch,
            step=step,
            base_weight_version=base,
            min_ready_groups=1,
            wait=Duration(seconds=wait),
        )
        return int((await self.stub.AwaitStep(request)).readiness.num_ready_groups)

    async def commit(self, step: int) -> None:
        """CommitStep."""
        request = pb.CommitStepRequest(run_id=self.run.run_id, epoch=self.epoch, step=step)
        await self.stub.CommitStep(request)

    async def publish(self, version: int, wait: int = 0) -> pb.AwaitPublishResponse:
        """AwaitPublish."""
        request = pb.AwaitPublishRequest(
            run_id=self.run.run_id,
            epoch=self.epoch,
            weight_version=version,
            wait=Duration(seconds=wait),
        )
        answer: pb.AwaitPublishResponse = await self.stub.AwaitPublish(request)
        return answer

    async def listed(self, **facts: Any) -> pb.ListSamplesResponse:
        """ListSamples."""
        request = pb.ListSamplesRequest(run_id=self.run.run_id, **facts)
        answer: pb.ListSamplesResponse = await self.stub.ListSamples(request)
        return answer


@pytest.fixture
async def trainer(store: Store) -> AsyncIterator[Trainer]:
    """A trainer of a run that is not created yet."""
    servicer = SampleServicer(store, LongPoll(store.runs))
    service = Service(servicers=[(add_SampleServiceServicer_to_server, servicer)])
    async with AsyncExitStack() as stack:
        config = ServerConfig(admin_port=-1, drain_seconds=0.0)
        port = await stack.enter_async_context(started(service, config))
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        await stack.enter_async_context(channel)
        yield Trainer(async_stub(SampleServiceStub, channel), Run(store, uuid.uuid4().hex))


def ids(samples: Any) -> list[str]:
    """Names of samples."""
    return [sample.sample_id for sample in samples]


async def test_listed_samples_are_the_leased_ones(trainer: Trainer) -> None:
    """In the same form: arrays as bytes, one byte of mask for each token."""
    await trainer.create()
    await trainer.run.submit("a")
    await trainer.run.fill(version=2)
    leased = (await trainer.lease(1, base_weight_version=2)).samples
    assert [entry.sample for entry in (await trainer.listed()).samples] == list(leased)
    assert list(unpack_ids(leased[0].tokens.token_ids)) == [1, 2, 3, 4, 5]
    assert len(leased[0].tokens.logprobs) == 20
    assert leased[0].loss_mask == bytes([0, 0, 0, 1, 1])


async def test_a_step_comes_in_pages(trainer: Trainer) -> None:
    """Together they are the whole answer, fresh samples and replayed ones."""
    replay = Replay(strategy=ReplayStrategy.RECENCY, capacity_groups=2, groups_per_step=1)
    await trainer.create(replay=replay, max_staleness=3)
    await trainer.run.submit("a", "b")
    await trainer.run.fill()
    await trainer.lease(1)
    await trainer.commit(1)
    whole = await trainer.lease(2)
    assert ids(whole.samples) == ["b/0/1#t1", "b/1/1#t1", "a/0/1#t1", "a/1/1#t1"]
    assert [sample.replayed for sample in whole.samples] == [False, False, True, True]
    samples, first = list[Any](), 0
    for number in range(4):
        page = await trainer.lease(2, first_sample=first, max_bytes=1)
        assert page.lease_token == whole.lease_token
        samples += page.samples
        assert page.next_sample == (number + 1) % 4
        first = page.next_sample
    assert samples == list(whole.samples)
    large = await trainer.lease(2, max_bytes=1 << 20)
    assert (len(large.samples), large.next_sample) == (4, 0)
    end = await trainer.lease(2, first_sample=4)
    assert (len(end.samples), end.next_sample, end.lease_token) == (0, 0, large.lease_token)
    for wrong in ({"first_sample": 5}, {"first_sample": -1}, {"max_bytes": -1}):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await trainer.lease(2, **wrong)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_replayed_samples_are_whole_and_not_stale(trainer: Trainer) -> None:
    """MASK masks fresh samples; replay is old by intention."""
    replay = Replay(strategy=ReplayStrategy.RECENCY, capacity_groups=2, groups_per_step=1)
    await trainer.create(replay=replay, staleness_policy=StalenessPolicy.MASK)
    await trainer.run.submit("a", "b")
    await trainer.run.fill(version=0)
    await trainer.lease(1)
    await trainer.commit(1)
    leased = await trainer.lease(2, base_weight_version=9)
    assert [1 in sample.loss_mask for sample in leased.samples] == [False, False, True, True]
    assert (leased.max_staleness, leased.num_deliveries) == (0, 1)


async def test_a_trainer_is_never_told_of_a_group_that_it_cannot_lease(trainer: Trainer) -> None:
    """Also not of one that completes while it waits: one sampled with newer weights ends it."""
    await trainer.create(group_size=1, groups_per_step=1)
    await trainer.run.submit("a", "b")
    waiting = asyncio.create_task(trainer.awaits(1, base=9, wait=50))
    await trainer.run.fill(version=0)
    runs = trainer.run.store.runs
    while (await runs.run_counts(trainer.run.run_id)).num_discarded_groups < 2:
        await asyncio.sleep(0.01)
    assert not waiting.done()
    await trainer.run.submit("c")
    await trainer.run.fill(version=9)
    assert await waiting == 1
    leased = await trainer.lease(1, base_weight_version=9)
    assert {sample.min_weight_version for sample in leased.samples} == {9}


async def test_a_trainer_is_not_told_of_a_group_that_completes_while_others_are_discarded(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two reads of one attempt; it is too old, too."""
    await trainer.create(group_size=1, groups_per_step=1)
    ledger = trainer.run.store.ledger
    await_step, num_calls = ledger.await_step, 0

    async def then_one_completes(*given: Any) -> int:
        nonlocal num_calls
        num_calls += 1
        num_too_old = await await_step(*given)
        if num_calls < 3:
            await trainer.run.submit(f"{num_calls}")
            await trainer.run.fill(version=0)
        return num_too_old

    monkeypatch.setattr(ledger, "await_step", then_one_completes)
    assert await trainer.awaits(1, base=9) == 0
    assert num_calls == 3


async def test_a_publish_waits_for_running_rollouts(trainer: Trainer) -> None:
    """The oldest recorded token decides; without tokens, or once it is trained, nothing blocks."""
    await trainer.create(staleness_policy=StalenessPolicy.WAIT, publish_wait_seconds=600.0)
    run = trainer.run
    await run.submit("a")
    leases = [await run.lease(), await run.lease()]
    for lease in leases:
        assert lease is not None
        await run.start(lease.rollout_id, lease.nonce)
    assert (await trainer.publish(9)).publish
    for lease, version in zip(leases, (1, 3), strict=True):
        assert lease is not None
        await run.turn(lease.rollout_id, "t", [1], [2], policy(version))
    answers = [await trainer.publish(version) for version in (2, 3, 5)]
    assert [answer.publish for answer in answers] == [True, False, False]
    assert [answer.num_blocking for answer in answers] == [0, 1, 2]
    for lease in leases:
        assert lease is not None
        await run.finish(lease.rollout_id)
    blocked = await trainer.publish(3)
    assert (blocked.publish, blocked.num_blocking) == (False, 1)
    assert len((await trainer.lease(1, base_weight_version=2)).samples) == 2
    assert (await trainer.publish(3, wait=5)).publish


async def test_a_publish_waits_a_bounded_time(trainer: Trainer) -> None:
    """After max_publish_wait it publishes, and counts what that makes too old."""
    await trainer.create(staleness_policy=StalenessPolicy.WAIT, publish_wait_seconds=0.01)
    await trainer.run.submit("a")
    await trainer.run.fill(version=0)
    while not (answer := await trainer.publish(5)).publish:
        assert answer.num_blocking == 1
    assert answer.num_blocking == 1


async def test_other_policies_never_wait(trainer: Trainer) -> None:
    """The control: under DROP the same publish goes ahead at once."""
    await trainer.create()
    await trainer.run.submit("a")
    await trainer.run.fill(version=0)
    assert (await trainer.publish(5)).publish


async def test_samples_are_listed_with_their_outcome(trainer: Trainer) -> None:
    """Trained ones, those of other purposes, failed ones; not those of running rollouts."""
    await trainer.create()
    run = trainer.run
    await run.submit("a", "b")
    await run.submit("e", num_samples=1, purpose=Purpose.EVAL)
    await run.play()  # the evaluation
    await run.play(outcome=failed())
    await run.fill()
    await run.start("running")
    await run.turn("running", "t", [1], [2])
    await trainer.lease(1)
    await trainer.commit(1)
    found: list[pb.ListedSample] = []
    token = ""
    while True:
        page = await trainer.listed(page_size=2, page_token=token)
        found += page.samples
        token = page.next_page_token
        if not token:
            break
    rows = {entry.sample.rollout_id: entry for entry in found}
    assert len(rows) == len(found) == 6
    assert {name: entry.committed_step for name, entry in rows.items()} == {
        "e/0/1": 0,
        "a/0/1": 0,
        "a/0/2": 1,
        "a/1/1": 1,
        "b/0/1": 0,
        "b/1/1": 0,
    }
    assert rows["e/0/1"].purpose == tokens_pb2.PURPOSE_EVAL
    assert rows["a/0/1"].state == trajectory_pb2.ROLLOUT_STATE_FAILED
    assert rows["a/0/2"].state == trajectory_pb2.ROLLOUT_STATE_FINISHED
    assert list(rows["a/0/1"].sample.loss_mask) == [False, False, False, True, True]
