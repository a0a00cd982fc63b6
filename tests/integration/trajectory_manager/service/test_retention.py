"""Deletion: needed rollouts stay, all others are deleted without a trace."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from redis.asyncio import Redis
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.chassis.errors import Reason, ServiceError
from services.lib.token_bytes import pack_logprobs
from tests.lib.trajectory_manager.client import Client, running_manager
from tests.lib.trajectory_manager.support import RULES, Run, failed, rewarded, token_append, tokens
from trajectory_manager.model.records import Durability, Outcome, ReplayStrategy
from trajectory_manager.model.runs import Replay
from trajectory_manager.service.sweeper import Retention
from trajectory_manager.store.redis.connect import SCRIPTS, Store, redis_store
from trajectory_manager.store.redis.retention_store import EndedGroup


async def new_run(store: Store, **rules: Any) -> Run:
    """A run with other rules."""
    run = Run(store, uuid.uuid4().hex)
    await store.runs.create_run(run.run_id, replace(RULES, **rules))
    return run


async def train(run: Run, step: int, *outcomes: Outcome) -> None:
    """One group, from its task to the commit of its step."""
    await run.submit(f"g{step}")
    for outcome in outcomes:
        await run.play(outcome=outcome)
    while await run.play():
        pass
    ledger = run.store.ledger
    epoch = (await ledger.reconcile(run.run_id, step - 1, "trainer")).epoch
    assert (await ledger.lease_samples(run.run_id, epoch, step, 0, 1)).lease is not None
    await ledger.commit(run.run_id, epoch, step)


def retention(run: Run) -> Retention:
    """What deletes in the run's store."""
    return Retention(run.store)


async def there(run: Run, *rollout_ids: str) -> list[bool]:
    """Which of the rollouts are stored."""
    found = await run.store.tokens.read(run.run_id, rollout_ids)
    return [record is not None for record in found]


async def test_only_unneeded_rollouts_are_deleted(store: Store) -> None:
    """Running rollouts and those of waiting groups stay; trained, failed and EVAL ones may go."""
    run = await new_run(store)
    await train(run, 1)
    await run.submit("g2")
    await run.play()
    await run.start("eval")
    await run.start("done")
    await run.turn("done", "t", [1], [2])
    await run.finish("done")
    asked = ["g1/0/1", "g2/0/1", "eval", "done", "never", "g1/0/1"]
    await store.runs.add_stored_tokens(run.run_id, 100)
    before = (await store.runs.run_counts(run.run_id)).num_stored_tokens
    deleted = await retention(run).delete(run.run_id, asked)
    assert (deleted.num_deleted, list(deleted.needed_rollout_ids)) == (2, ["g2/0/1", "eval"])
    assert await there(run, *asked[:4]) == [False, True, True, False]
    # A rollout of `play` has 5 tokens, "done" has 2.
    assert (await store.runs.run_counts(run.run_id)).num_stored_tokens == before - 7
    again = await retention(run).delete(run.run_id, asked)
    assert (again.num_deleted, list(again.needed_rollout_ids)) == (0, ["g2/0/1", "eval"])


async def test_sweeps_at_the_same_time_count_tokens_once(store: Store) -> None:
    """Every agent that waits for a task sweeps, and the count decides whether admission is open."""
    run = await new_run(store)
    rollouts = run.rollouts  # one process: the first sweep counts what it appended
    for number in range(3):
        name = f"r{number}"
        await run.start(name)
        opened = await run.begin(name, "t", [1])
        given = token_append(run.run_id, name, "t", opened.epoch, 0, tokens([1, 2, 3]))
        await rollouts.append([given])
        await asyncio.gather(*(rollouts.sweep(run.run_id) for _ in range(5)))
        counted = (await store.runs.run_counts(run.run_id)).num_stored_tokens
        assert counted == 3 * (number + 1)


async def test_an_unsettled_rollout_is_needed(store: Store) -> None:
    """Its group has not heard of its end."""
    run = await new_run(store)
    await run.start("r")
    await run.turn("r", "t", [1], [2])
    await store.runs.add_outbox_marks(run.run_id, ["r"])
    await run.finish("r")
    assert (await retention(run).delete(run.run_id, ["r"])).needed_rollout_ids == ["r"]


async def test_an_unknown_run_is_an_error(store: Store) -> None:
    """Nothing is deleted where nothing is known to be needed."""
    with pytest.raises(ServiceError) as caught:
        await Retention(store).delete("nobody", ["r"])
    assert caught.value.reason is Reason.NOT_FOUND


async def test_the_sweep_deletes_groups_past_retention(store: Store) -> None:
    """All attempts of a group are deleted retention_steps after its commit."""
    run = await new_run(store, retention_steps=1)
    await run.submit("g1")
    await run.play(outcome=failed())
    await train(run, 1)
    assert await there(run, "g1/0/1", "g1/0/2", "g1/1/1") == [True, True, True]
    assert await retention(run).sweep(run.run_id) == 0
    await train(run, 2)
    assert await retention(run).sweep(run.run_id) == 0
    await train(run, 3)
    assert await retention(run).sweep(run.run_id) == 1
    assert await there(run, "g1/0/1", "g1/0/2", "g1/1/1", "g2/0/1") == [False, False, False, True]
    assert await retention(run).sweep(run.run_id) == 0
    assert await store.ledger.committed_steps(run.run_id, ["g1/0/2", "g2/0/1"]) == [0, 2]


async def test_dead_groups_are_swept_too(store: Store) -> None:
    """What was filtered out takes no space for ever."""
    run = await new_run(store, retention_steps=1, zero_variance_reward="reward")
    await run.submit("same")
    while await run.play():
        pass
    assert await there(run, "same/0/1", "same/1/1") == [True, True]
    for step in (1, 2):
        await train(run, step, rewarded(step), rewarded(-step))
    assert await retention(run).sweep(run.run_id) == 1
    assert await there(run, "same/0/1", "same/1/1", "g1/0/1") == [False, False, True]


async def test_a_group_with_a_rollout_that_runs_is_swept_later(store: Store) -> None:
    """A surplus rollout keeps the record of its group until it is closed."""
    run = await new_run(store, retention_steps=1, num_extra_samples=1)
    await run.submit("g1")
    surplus = await run.lease()
    assert surplus is not None
    await run.start(surplus.rollout_id, surplus.nonce)
    for step in (1, 2, 3):
        await train(run, step)
    assert await retention(run).sweep(run.run_id) == 0
    assert await there(run, "g1/0/1", "g1/1/1") == [True, False]
    while await run.rollouts.sweep(run.run_id):
        pass
    assert await retention(run).sweep(run.run_id) == 1
    assert await there(run, "g1/0/1") == [False]


async def test_without_retention_nothing_is_deleted(store: Store) -> None:
    """0 steps: kept for ever."""
    run = await new_run(store)
    for step in range(1, 4):
        await train(run, step)
    assert await retention(run).sweep(run.run_id) == 0
    assert await there(run, "g1/0/1") == [True]


async def test_a_sweep_that_died_is_finished(store: Store) -> None:
    """Rollouts go before the record of their group: what one sweep began, the next one ends."""
    run = await new_run(store, retention_steps=1)
    for step in range(1, 4):
        await train(run, step)
    due = await store.retention.due(run.run_id, 10)
    assert due == [EndedGroup(task_id="g1", attempts=(1, 1))]
    await store.retention.delete(run.run_id, due[0].rollout_ids[:1])
    assert await retention(run).sweep(run.run_id) == 1
    assert await there(run, "g1/0/1", "g1/1/1") == [False, False]


async def test_what_may_be_replayed_stays(store: Store) -> None:
    """A group is due when it has left the replay and no leased step replays it."""
    replay = Replay(strategy=ReplayStrategy.RECENCY, capacity_groups=2, groups_per_step=1)
    run = await new_run(store, retention_steps=1, replay=replay)
    for step in range(1, 6):
        await train(run, step)
        await retention(run).sweep(run.run_id)
        recent = [f"g{kept}/0/1" for kept in range(max(1, step - 1), step + 1)]
        assert all(await there(run, *recent))
        assert (await retention(run).delete(run.run_id, recent)).needed_rollout_ids == list(recent)
    assert await there(run, "g1/0/1", "g2/0/1") == [False, False]


async def test_without_the_check_a_replayed_group_is_deleted(
    redis_url: str, tmp_path: Path
) -> None:
    """Negative control: retention alone would delete what a step may draw again."""
    for path in SCRIPTS.glob("*.lua"):
        source = path.read_text()
        if path.stem == "list_retention_due":
            assert source.count(" and not held") == 1
            source = source.replace(" and not held", "")
        (tmp_path / path.name).write_text(source)
    replay = Replay(strategy=ReplayStrategy.RECENCY, capacity_groups=3, groups_per_step=1)
    async with redis_store(redis_url, Durability.FAST, 5.0, tmp_path) as store:
        run = await new_run(store, retention_steps=1, replay=replay)
        for step in (1, 2, 3):
            await train(run, step)
        await retention(run).sweep(run.run_id)
        assert await there(run, "g1/0/1", "g2/0/1") == [False, True]


async def test_a_deleted_rollout_leaves_no_keys(redis_url: str) -> None:
    """Header, turns, tokens and columns are gone."""
    async with redis_store(redis_url, Durability.FAST, 5.0) as store:
        run = await new_run(store, required_columns=("value",))
        await run.submit("a")
        await run.play()
        await run.play()
        lease = await store.columns.lease(run.run_id, "value", (), 8, "nonce")
        assert lease is not None
        value = dict.fromkeys(lease.sample_ids, pack_logprobs([1.0]))
        await store.columns.put(run.run_id, "value", lease.epoch, value, new=True)
        redis = Redis.from_url(redis_url)
        pattern = f"sf:{{{run.run_id}:a/0/1}}*"
        assert len([key async for key in redis.scan_iter(pattern, 1000)]) == 3
        await store.retention.delete(run.run_id, ["a/0/1"])
        assert [key async for key in redis.scan_iter(pattern, 1000)] == []
        with pytest.raises(ServiceError) as caught:
            await store.columns.put(run.run_id, "value", lease.epoch + 1, value, new=True)
        assert caught.value.reason is Reason.NOT_FOUND
        assert [key async for key in redis.scan_iter(pattern, 1000)] == []
        await redis.aclose()


async def test_deletion_over_grpc(store: Store) -> None:
    """The response has the number deleted and those needed; the sweep applies retention."""
    run = await new_run(store)
    await train(run, 1)
    await run.submit("g2")
    await run.play()
    async with (
        running_manager(store) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        client = Client(channel, run.run_id)
        request = pb.DeleteTrajectoriesRequest(
            run_id=run.run_id, rollout_ids=["g1/0/1", "g1/1/1", "g2/0/1"]
        )
        answer = await client.trajectories.DeleteTrajectories(request)
        assert (answer.num_deleted, list(answer.needed_rollout_ids)) == (2, ["g2/0/1"])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.get("g1/0/1")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
