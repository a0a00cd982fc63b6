"""Columns per sample: computed from the end of a rollout on, while others of its group run."""

from __future__ import annotations

import asyncio
import random
import uuid
from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis
from seamflow.durations import to_duration
from seamflow.trajectory.v1 import column_service_pb2 as pb

from services.chassis.errors import Reason
from services.lib.token_bytes import pack_logprobs
from tests.integration.trajectory_manager.store.test_columns import REF, VALUE, leased, put, write
from tests.lib.trajectory_manager.support import (
    Run,
    failed,
    other_run,
    policy,
    refused,
    rewarded,
)
from trajectory_manager.api.column_servicer import ColumnServicer
from trajectory_manager.api.lease_token import column_token
from trajectory_manager.model.records import (
    MAX_REPLACEMENTS,
    DeadLetterReason,
    Durability,
    FailureClass,
    Outcome,
    TaskLease,
)
from trajectory_manager.service.long_poll import LongPoll
from trajectory_manager.store.redis import keys
from trajectory_manager.store.redis.column_store import ColumnLease
from trajectory_manager.store.redis.connect import SCRIPTS, Store, redis_store

A0, A1, B0, B1 = "a/0/1#t1", "a/1/1#t1", "b/0/1#t1", "b/1/1#t1"


async def run_of_two(store: Store, *task_ids: str, **rules: Any) -> Run:
    """A run of groups of two samples, of which none has begun."""
    run = await other_run(store, **{"required_columns": (REF,), "max_staleness": 7, **rules})
    await run.submit(*task_ids)
    return run


async def begun(run: Run, number: int) -> list[TaskLease]:
    """So many rollouts with a turn, in the order of their leases."""
    found = []
    for _ in range(number):
        lease = await run.lease()
        assert lease is not None
        await run.start(lease.rollout_id, lease.nonce)
        await run.turn(lease.rollout_id, "t1", [1, 2, 3], [4, 5], policy())
        found.append(lease)
    return found


async def counts(run: Run) -> tuple[int, int]:
    """Groups that are ready, and complete groups that lack columns."""
    found = await run.store.runs.run_counts(run.run_id)
    return found.num_ready_groups, found.num_incomplete_groups


async def nothing_to_lease(run: Run) -> bool:
    """Whether no cell is queued."""
    lease = run.store.columns.lease
    return await lease(run.run_id, REF, (), 512, uuid.uuid4().hex) is None


async def test_a_finished_sample_is_scored_while_others_of_its_group_run(store: Store) -> None:
    """The group is ready once it is complete, without another call of a consumer."""
    run = await run_of_two(store, "a", required_columns=(REF, VALUE))
    first, second = await begun(run, 2)
    assert await nothing_to_lease(run)
    await run.finish(first.rollout_id)
    early = await leased(run, REF)
    assert early.sample_ids == (A0,)
    assert (await write(run, REF, early)).num_ready_groups == 0
    assert (await leased(run, VALUE, needs=(REF,))).sample_ids == (A0,)
    assert await counts(run) == (0, 0)
    await run.finish(second.rollout_id)
    assert await counts(run) == (0, 1)


async def test_a_group_whose_samples_are_scored_is_ready_when_it_ends(store: Store) -> None:
    """Here its last rollout has no sample; a write that is repeated afterwards is no error."""
    run = await run_of_two(store, "a")
    (first,) = await begun(run, 1)
    await run.finish(first.rollout_id)
    early = await leased(run, REF)
    await write(run, REF, early)
    last = await run.lease()
    assert last is not None
    await run.start(last.rollout_id, last.nonce)
    without = Outcome(rewards=rewarded().rewards, failure_class=FailureClass.POLICY)
    await run.finish(last.rollout_id, without)
    assert await counts(run) == (1, 0)
    assert (await write(run, REF, early)).num_written == 0


async def test_samples_of_complete_groups_come_first(store: Store) -> None:
    """Also before older samples, and after a lease that is over."""
    run = await run_of_two(store, "a", "b", lease_seconds=0.5)
    a, _, b, other_b = await begun(run, 4)
    for lease in (a, b, other_b):
        await run.finish(lease.rollout_id)
    assert (await leased(run, REF, 1)).sample_ids == (B0,)
    assert (await leased(run, REF)).sample_ids == (B1, A0)
    await asyncio.sleep(0.6)
    assert (await leased(run, REF)).sample_ids == (B0, B1, A0)


@pytest.mark.parametrize("is_leased", [False, True])
@pytest.mark.parametrize("reason", [DeadLetterReason.ZERO_VARIANCE, DeadLetterReason.FAILURES])
async def test_a_discarded_group_leaves_nothing_to_score(
    store: Store, reason: DeadLetterReason, is_leased: bool
) -> None:
    """Neither what was queued nor what was leased; the rest of that lease is written."""
    run = await run_of_two(store, "a", "b", zero_variance_reward="reward")
    first, second = await begun(run, 2)
    await run.finish(first.rollout_id, rewarded(0.5))
    lease = await leased(run, REF) if is_leased else None
    if reason is DeadLetterReason.ZERO_VARIANCE:
        await run.finish(second.rollout_id, rewarded(0.5))
    else:
        await run.finish(second.rollout_id, failed())
        for _ in range(MAX_REPLACEMENTS):
            (again,) = await begun(run, 1)
            await run.finish(again.rollout_id, failed())
    (letter,) = await store.runs.dead_letters(run.run_id, 0, 9)
    assert letter.reason is reason
    assert await nothing_to_lease(run)
    assert await store.columns.status(run.run_id, "", 9) == []
    if lease is not None:
        found = await store.columns.leased(run.run_id, REF, lease.epoch, lease.sample_ids)
        assert (found.unwritten, found.unneeded) == ((), (A0,))
        await refused(Reason.LEASE_EXPIRED, put(run, REF, lease, 1.0, new=False))


async def test_a_batch_is_written_though_a_group_of_it_was_discarded(store: Store) -> None:
    """Its other samples are not scored twice, and a requeued group is no obstacle either."""
    run = await run_of_two(store, "a", "b", zero_variance_reward="reward")
    a, other_a, b, other_b = await begun(run, 4)
    await run.finish(a.rollout_id, rewarded(0.5))
    await run.finish(b.rollout_id, rewarded(0.25))
    lease = await leased(run, REF)
    assert lease.sample_ids == (A0, B0)
    await run.finish(other_a.rollout_id, rewarded(0.5))
    await store.runs.requeue(run.run_id, ["a"])
    await begun(run, 1)
    request = pb.WriteColumnRequest(
        run_id=run.run_id, column=REF, lease_token=column_token(lease.epoch)
    )
    for name in lease.sample_ids:
        request.values.add(sample_id=name, values=pack_logprobs([1.0]))
    context: Any = None
    servicer = ColumnServicer(store, LongPoll(store.runs))
    assert (await servicer.WriteColumn(request, context)).num_written == 1
    assert (await servicer.WriteColumn(request, context)).num_written == 0
    await run.finish(other_b.rollout_id, rewarded(0.75))
    assert (await leased(run, REF)).sample_ids == (B1,)


async def test_what_a_consumer_gives_back_is_leased_again_at_once(store: Store) -> None:
    """Under a new epoch, in its old place; what it wrote or what others hold stays."""
    run = await run_of_two(store, "a", "b")
    for rollout in await begun(run, 4):
        await run.finish(rollout.rollout_id)
    first, second = await leased(run, REF, 3), await leased(run, REF)
    assert first.sample_ids == (A0, A1, B0)
    part = ColumnLease(sample_ids=(A0,), epoch=first.epoch, seconds=1.0)
    await write(run, REF, part)
    assert await nothing_to_lease(run)
    give_back, names = store.columns.give_back, (A0, A1, B0, B1, "c/0/1#t1")
    assert await give_back(run.run_id, REF, first.epoch, names) == 2
    assert await give_back(run.run_id, REF, first.epoch, names) == 0
    assert (await store.columns.backlog(run.run_id, REF)).num_samples == 3
    await refused(Reason.LEASE_EXPIRED, write(run, REF, first))
    again = await leased(run, REF)
    assert (again.sample_ids, again.epoch > second.epoch) == ((A1, B0), True)
    await write(run, REF, again)
    assert (await write(run, REF, second)).num_ready_groups == 1
    assert (await store.columns.backlog(run.run_id, REF)).num_samples == 0


async def test_a_backlog_is_waited_for(store: Store) -> None:
    """Until there are so many samples, until no more can come, or until time is up."""
    run = await run_of_two(store, "a")
    servicer, context = ColumnServicer(store, LongPoll(store.runs)), cast(Any, None)

    async def backlog(min_samples: int, wait: float) -> pb.GetColumnBacklogResponse:
        request = pb.GetColumnBacklogRequest(
            run_id=run.run_id, column=REF, min_samples=min_samples, wait=to_duration(wait)
        )
        return await servicer.GetColumnBacklog(request, context)

    assert await backlog(0, 0.05) == pb.GetColumnBacklogResponse()
    first, second = await begun(run, 2)
    waiting = asyncio.create_task(backlog(1, 20))
    await run.finish(first.rollout_id)
    one = pb.GetColumnBacklogResponse(num_samples=1, num_running_rollouts=1)
    assert await waiting == one
    assert await backlog(9, 0.05) == one
    waiting = asyncio.create_task(backlog(9, 20))
    await run.finish(second.rollout_id)
    assert await waiting == pb.GetColumnBacklogResponse(num_samples=2)


async def test_rollouts_that_end_in_any_order_are_scored_once_each(store: Store) -> None:
    """While consumers take what there is, and groups are discarded in between."""
    number, dice = 6, random.Random(7)
    names = [f"task-{index}" for index in range(number)]
    run = await run_of_two(store, *names, zero_variance_reward="reward")
    running = await begun(run, 2 * number)
    dice.shuffle(running)
    scored: list[str] = []

    async def consumer() -> None:
        while await counts(run) != (number - 2, 0):
            lease = await store.columns.lease(run.run_id, REF, (), 2, uuid.uuid4().hex)
            if lease is None:
                await asyncio.sleep(0.001)
                continue
            found = await store.columns.leased(run.run_id, REF, lease.epoch, lease.sample_ids)
            await write(run, REF, lease)
            scored.extend(found.unwritten)

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(consumer())
        group.create_task(consumer())
        for place, lease in enumerate(running):
            is_discarded = lease.task.task_id in names[:2]
            await run.finish(lease.rollout_id, rewarded(0.0 if is_discarded else 1.0 + place))
            await asyncio.sleep(0)
    assert len(scored) == len(set(scored))
    assert {name.split("/")[0] for name in scored} >= set(names[2:])
    assert await nothing_to_lease(run)


async def test_without_the_extra_cell_a_group_would_be_ready_too_early(
    redis_url: str, tmp_path: Path
) -> None:
    """Negative control: the trainer would get a group of which a rollout still runs."""
    extra = "redis.call('HSETNX', cells, task_id, 1)"
    for path in SCRIPTS.glob("*.lua"):
        source = path.read_text()
        assert source.count(extra) == (path.stem == "_cell_queue")
        (tmp_path / path.name).write_text(source.replace(extra, ""))
    async with redis_store(redis_url, Durability.FAST, 5.0, tmp_path) as store:
        run = await run_of_two(store, "a")
        first, _ = await begun(run, 2)
        await run.finish(first.rollout_id)
        assert (await write(run, REF, await leased(run, REF))).num_ready_groups == 1


async def test_what_a_manager_of_the_release_before_leaves_is_set_right(redis_url: str) -> None:
    """It queues cells only when a group completes, again, and drops none of a discarded one."""
    async with redis_store(redis_url, Durability.FAST, 5.0) as store:
        run = await run_of_two(store, "a", "b")
        redis: Any = Redis.from_url(redis_url)
        of_run = dict(zip(keys.RUN_PARTS, keys.run_keys(run.run_id), strict=True))
        cells, queue = of_run["cells"], of_run["cell_queue"]
        first, second = await begun(run, 2)
        await run.finish(first.rollout_id)
        await redis.delete(cells, queue)  # it queued nothing
        await run.finish(second.rollout_id)
        await redis.zadd(queue, {f"{REF} 000000000900 {A0}": 0, f"{REF} 000000000901 c/0/1#t1": 0})
        await redis.hset(cells, mapping={f"{REF} c/0/1#t1": "000000000901", "c": 2})
        lease = await leased(run, REF)
        assert lease.sample_ids == (A0, A1)
        assert (await write(run, REF, lease)).num_ready_groups == 1
        assert await nothing_to_lease(run)
        assert await redis.exists(cells, queue) == 0
        await redis.aclose()
