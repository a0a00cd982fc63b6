"""The services over real gRPC: two replicas on one store, which own nothing."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import (
    sample_service_pb2,
    task_service_pb2,
    trajectory_pb2,
    trajectory_service_pb2,
)

from bench.harness.store_calls import send_async
from services.lib.token_bytes import unpack_ids
from tests.lib.trajectory_manager.client import CREDENTIAL, Client, message, reason_of

POLICY = tokens_pb2.ORIGIN_POLICY


async def test_a_rollout_may_use_any_replica(replicas: tuple[Client, Client]) -> None:
    """What one replica stored, another one continues, reads and leases."""
    first, second = replicas
    await first.submit("a")
    name = await first.play(version=3)
    other = await second.play(version=3)
    assert {name, other} == {"a/0/1", "a/1/1"}
    stored = await second.get(name)
    assert stored.state == trajectory_pb2.ROLLOUT_STATE_FINISHED
    assert [turn.prefix_turn_id for turn in stored.turns] == ["", "t1"]
    assert list(stored.turns[1].tokens.token_ids) == [5, 6]
    epoch = await first.reconcile()
    leased = await second.lease_samples(epoch, 1, base=4, wait=5)
    assert [sample.rollout_id for sample in leased.samples] == [name, other]
    assert leased.max_staleness == 1
    sample = leased.samples[0]
    assert sample.sample_id == f"{name}#t2"
    assert list(unpack_ids(sample.tokens.token_ids)) == [1, 2, 3, 4, 5, 6]
    assert sample.loss_mask == bytes([0, 0, 1, 1, 0, 1])
    assert [(turn.turn_id, turn.num_tokens) for turn in sample.turns] == [("t1", 4), ("t2", 2)]
    assert (sample.min_weight_version, sample.max_weight_version) == (3, 3)
    assert [span.start for span in sample.tokens.spans] == [0, 2, 4, 5]
    assert sample.rewards[0].value == 1.0


async def test_a_waiting_trainer_is_woken_by_another_replica(
    replicas: tuple[Client, Client],
) -> None:
    """A long-poll answers when the group completes, wherever that happens."""
    first, second = replicas
    await first.submit("a")
    epoch = await first.reconcile()
    waiting = asyncio.create_task(first.lease_samples(epoch, 1, wait=30))
    await second.play()
    await second.play()
    assert len((await waiting).samples) == 2


async def test_a_trainer_waits_for_enough_groups(replicas: tuple[Client, Client]) -> None:
    """AwaitStep answers once that many groups are ready; GetReadiness only reads the same."""
    first, second = replicas
    await first.submit("a", "b", "c")
    request = sample_service_pb2.AwaitStepRequest(
        run_id=first.run_id,
        epoch=await first.reconcile(),
        step=1,
        min_ready_groups=1,
        wait=Duration(seconds=30),
    )
    waiting = first.samples.AwaitStep(request)
    await second.play()
    await second.play()
    counts = (await waiting).readiness
    read = sample_service_pb2.GetReadinessRequest(run_id=first.run_id)
    same = (await second.samples.GetReadiness(read)).readiness
    same.num_stored_tokens = counts.num_stored_tokens  # counted shortly after they are stored
    assert same == counts
    assert (counts.num_ready_groups, counts.num_queued_tasks) == (1, 2)
    assert (counts.num_admitted_groups, counts.num_admissible_groups) == (1, 1)


async def test_a_waiting_trainer_reports_its_next_base_version(
    replicas: tuple[Client, Client],
) -> None:
    """Groups admitted then require newer weights; a stale trainer is rejected."""
    first, second = replicas
    await first.submit("a", "b", "c")
    epoch = await first.reconcile()
    await first.play()
    await first.play()
    first_wait = sample_service_pb2.AwaitStepRequest(run_id=first.run_id, epoch=epoch, step=1)
    await first.samples.AwaitStep(first_wait)
    await first.lease_samples(epoch, 1, wait=30)
    names = [(await second.lease()).task.task_id for _ in range(3)]
    assert names == ["b", "b", ""], "while it trains there are no weights for more than a batch"
    request = sample_service_pb2.AwaitStepRequest(
        run_id=first.run_id, epoch=epoch, step=2, base_weight_version=7
    )
    await first.samples.AwaitStep(request)
    lease = await second.lease()
    assert lease.task.task_id == "c"
    await second.start(lease.rollout_id, lease.lease_token)
    # For step 3, which starts from version 8 and takes what is one version older.
    assert (await second.begin(lease.rollout_id, "t", [1])).required_weight_version == 7
    await first.reconcile(trainer_id="newer")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await first.samples.AwaitStep(request)
    assert caught.value.code() is grpc.StatusCode.ABORTED


async def test_the_lease_of_a_finished_rollout_is_lost(replicas: tuple[Client, Client]) -> None:
    """The others are extended by the run's lease_duration; a failed rollout is replaced."""
    first, second = replicas
    await first.submit("a")
    failed, held = await first.lease(), await first.lease()
    await first.start(failed.rollout_id, failed.lease_token)
    finish = trajectory_service_pb2.RolloutFinish(
        run_id=first.run_id,
        rollout_id=failed.rollout_id,
        credential_digest=CREDENTIAL,
        failure=tokens_pb2.Failure(
            failure_class=tokens_pb2.FAILURE_CLASS_ENVIRONMENT, message="no disk"
        ),
    )
    for client in replicas:
        await send_async(client.trajectories, finish)
    extend = task_service_pb2.ExtendTasksRequest(
        run_id=first.run_id, lease_tokens=[failed.lease_token, held.lease_token]
    )
    answer = await second.tasks.ExtendTasks(extend)
    assert answer.lost_lease_tokens == [failed.lease_token]
    assert answer.lease_duration.seconds == 60
    assert (await second.get(failed.rollout_id)).failure == finish.failure
    assert (await second.lease()).rollout_id == "a/0/2"


async def test_a_stale_writer_gets_the_current_epoch(
    replicas: tuple[Client, Client],
) -> None:
    """The fenced gateway gets ABORTED / STALE_EPOCH at its next append."""
    first, second = replicas
    await first.start("r")
    old = (await first.begin("r", "t", [1], "a")).epoch
    await first.append("r", "t", old, 0, message([1]))
    new = await second.begin("r", "t", [1], "b")
    assert list(unpack_ids(new.tokens.token_ids)) == [1]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await first.append("r", "t", old, 1, message([2], POLICY))
    assert caught.value.code() is grpc.StatusCode.ABORTED
    assert reason_of(caught.value) == "STALE_EPOCH"
    assert await second.append("r", "t", new.epoch, 1, message([2], POLICY)) == 2


def _spans(*lengths: tuple[int, int]) -> tokens_pb2.Tokens:
    spans = [
        tokens_pb2.Span(start=start, num_tokens=length, origin=tokens_pb2.ORIGIN_ENVIRONMENT)
        for start, length in lengths
    ]
    return tokens_pb2.Tokens(token_ids=[1, 2], logprobs=[0, 0], spans=spans)


@pytest.mark.parametrize(
    "bad",
    [
        tokens_pb2.Tokens(),
        tokens_pb2.Tokens(token_ids=[1], logprobs=[0, 0], spans=[]),
        _spans(),
        _spans((0, 1)),
        _spans((0, 3)),
        _spans((1, 1)),
        _spans((0, 2), (1, 1)),
        _spans((0, 0), (0, 2)),
        tokens_pb2.Tokens(
            token_ids=[1],
            logprobs=[float("nan")],
            spans=[tokens_pb2.Span(num_tokens=1, origin=tokens_pb2.ORIGIN_POLICY)],
        ),
        tokens_pb2.Tokens(token_ids=[1], logprobs=[0], spans=[tokens_pb2.Span(num_tokens=1)]),
    ],
)
async def test_malformed_tokens_are_rejected(
    replicas: tuple[Client, Client], bad: tokens_pb2.Tokens
) -> None:
    """Lengths that differ, spans that do not cover, log-probs that are no numbers."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await replicas[0].append("r", "t", 1, 0, bad)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(caught.value) == "INVALID_FIELD"


async def test_training_needs_a_lease(replicas: tuple[Client, Client]) -> None:
    """TRAIN without one or under another name is rejected, and an EVAL name that looks leased."""
    first, _ = replicas
    await first.submit("a")
    lease = await first.lease()
    for rollout_id, token, purpose in (
        ("r", "", tokens_pb2.PURPOSE_TRAIN),
        ("r", lease.lease_token, tokens_pb2.PURPOSE_TRAIN),
        ("a/0/1", "", tokens_pb2.PURPOSE_EVAL),
    ):
        request = trajectory_service_pb2.NewRollout(
            run_id=first.run_id,
            rollout_id=rollout_id,
            lease_token=token,
            purpose=purpose,
            credential_digest=CREDENTIAL,
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await send_async(first.trajectories, request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_reader_with_a_credential_needs_the_right_one(
    replicas: tuple[Client, Client],
) -> None:
    """The gateway reads for agents; tools inside read without one."""
    first, second = replicas
    await first.start("r")
    request = trajectory_service_pb2.GetTrajectoryRequest(
        run_id=first.run_id, rollout_id="r", credential_digest=CREDENTIAL
    )
    assert (await second.trajectories.GetTrajectory(request)).trajectory.rollout_id == "r"
    assert (await second.get("r")).rollout_id == "r"
    request.credential_digest = "0" * 64
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await second.trajectories.GetTrajectory(request)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_trajectories_are_listed_and_watched(replicas: tuple[Client, Client]) -> None:
    """Pages come oldest first; the change feed ends when the rollout closes."""
    first, second = replicas
    for name in ("r1", "r2", "r3"):
        await first.start(name)
    request = trajectory_service_pb2.ListTrajectoriesRequest(run_id=first.run_id, page_size=2)
    page = await second.trajectories.ListTrajectories(request)
    assert [item.rollout_id for item in page.trajectories] == ["r1", "r2"]
    request.page_token = page.next_page_token
    page = await second.trajectories.ListTrajectories(request)
    assert ([item.rollout_id for item in page.trajectories], page.next_page_token) == (["r3"], "")
    watch = second.trajectories.WatchTrajectory(
        trajectory_service_pb2.WatchTrajectoryRequest(
            run_id=first.run_id, rollout_id="r1", interval=Duration(nanos=20_000_000)
        )
    )
    states = []
    async for change in watch:
        states.append((len(change.trajectory.turns), change.trajectory.state))
        if len(states) == 1:
            await first.begin("r1", "t", [1])
        if len(states) == 2:
            await first.finish("r1")
    running, finished = (
        trajectory_pb2.ROLLOUT_STATE_RUNNING,
        trajectory_pb2.ROLLOUT_STATE_FINISHED,
    )
    assert states == [(0, running), (1, running), (1, finished)]


async def test_the_trainer_s_calls_go_through(replicas: tuple[Client, Client]) -> None:
    """Extend, lease again, commit."""
    first, second = replicas
    await first.submit("a")
    await first.play()
    await first.play()
    epoch = await first.reconcile()
    leased = await first.lease_samples(epoch, 1)
    extend = sample_service_pb2.ExtendLeaseRequest(
        run_id=first.run_id, lease_token=leased.lease_token
    )
    assert (await second.samples.ExtendLease(extend)).remaining.seconds == 60
    assert await second.lease_samples(epoch, 1) == leased
    commit = sample_service_pb2.CommitStepRequest(run_id=first.run_id, epoch=epoch, step=1)
    assert (await second.samples.CommitStep(commit)).num_samples == 2
