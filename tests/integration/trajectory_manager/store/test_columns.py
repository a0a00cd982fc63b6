"""Columns: what consumers compute is leased once, fenced, and makes groups ready."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from redis.asyncio import Redis
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import column_service_pb2 as pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1.column_service_pb2 import WriteColumnResponse
from seamflow.trajectory.v1.column_service_pb2_grpc import ColumnServiceStub

from services.chassis.errors import Reason, ServiceError
from services.lib.token_bytes import pack_logprobs, unpack_logprobs
from tests.lib.trajectory_manager import client
from tests.lib.trajectory_manager.client import running_manager
from tests.lib.trajectory_manager.support import RULES, Run
from trajectory_manager.model.records import Durability
from trajectory_manager.store.redis import keys
from trajectory_manager.store.redis.column_store import ColumnLease
from trajectory_manager.store.redis.connect import SCRIPTS, Store, redis_store

REF, VALUE = "ref_logprobs", "value"
SAMPLES = ("a/0/1#t1", "a/1/1#t1", "b/0/1#t1", "b/1/1#t1")


async def waiting_run(store: Store, **rules: Any) -> Run:
    """A run whose groups a and b, of two samples each, wait for two columns."""
    run = Run(store, uuid.uuid4().hex)
    await store.runs.create_run(run.run_id, replace(RULES, required_columns=(REF, VALUE), **rules))
    await run.submit("a", "b")
    assert await run.fill() == 4
    return run


async def leased(
    run: Run, column: str, max_samples: int = 512, needs: tuple[str, ...] = ()
) -> ColumnLease:
    """A lease that must be there, perhaps as soon as another one is over."""
    async with asyncio.timeout(10):
        while True:
            lease = await run.store.columns.lease(
                run.run_id, column, needs, max_samples, uuid.uuid4().hex
            )
            if lease is not None:
                return lease
            await asyncio.sleep(0.01)


async def write(
    run: Run, column: str, lease: ColumnLease, value: float = 1.0
) -> WriteColumnResponse:
    """What ColumnService does with the values of a lease."""
    columns = run.store.columns
    found = await columns.leased(run.run_id, column, lease.epoch, lease.sample_ids)
    await put(run, column, lease, value)
    return await columns.complete(run.run_id, column, lease.epoch, found.unwritten)


async def put(run: Run, column: str, lease: ColumnLease, value: float, new: bool = True) -> None:
    """Store one value for each leased sample."""
    values = dict.fromkeys(lease.sample_ids, pack_logprobs([value]))
    await run.store.columns.put(run.run_id, column, lease.epoch, values, new=new)


async def stored(run: Run, sample_id: str) -> dict[str, float]:
    """The columns of a sample."""
    values = await run.store.columns.read(run.run_id, [sample_id])
    return {name: unpack_logprobs(data)[0] for name, data in values[sample_id].items()}


async def test_a_group_is_ready_with_its_last_column(store: Store) -> None:
    """Complete groups wait, apart from those that run, until all their samples have all columns."""
    run = await waiting_run(store)
    counts = await store.runs.run_counts(run.run_id)
    assert (counts.num_ready_groups, counts.num_incomplete_groups) == (0, 2)
    assert counts.num_running_groups == 0
    await write(run, REF, await leased(run, REF))
    three = await leased(run, VALUE, 3)
    assert await write(run, VALUE, three, 0.5) == WriteColumnResponse(
        num_written=3, num_ready_groups=1
    )
    counts = await store.runs.run_counts(run.run_id)
    assert (counts.num_ready_groups, counts.num_incomplete_groups) == (1, 1)
    assert (await write(run, VALUE, await leased(run, VALUE))).num_ready_groups == 1
    epoch = (await store.ledger.reconcile(run.run_id, 0, "trainer")).epoch
    step = (await store.ledger.lease_samples(run.run_id, epoch, 1, 0, 2)).lease
    assert step is not None
    assert step.sample_ids == SAMPLES
    assert await stored(run, SAMPLES[0]) == {REF: 1.0, VALUE: 0.5}


async def test_groups_are_ready_in_the_order_of_their_last_column(store: Store) -> None:
    """A group whose columns come first is trained first."""
    run = await waiting_run(store)
    await write(run, REF, await leased(run, REF))
    first, second = await leased(run, VALUE, 2), await leased(run, VALUE, 2)
    await write(run, VALUE, second)
    await write(run, VALUE, first)
    epoch = (await store.ledger.reconcile(run.run_id, 0, "trainer")).epoch
    step = (await store.ledger.lease_samples(run.run_id, epoch, 1, 0, 2)).lease
    assert step is not None
    assert step.sample_ids == (*SAMPLES[2:], *SAMPLES[:2])


async def test_a_cell_is_leased_to_one_consumer(store: Store) -> None:
    """Leases are disjoint and follow the order of completion; columns do not disturb each other."""
    run = await waiting_run(store)
    first, second = await leased(run, REF, 1), await leased(run, REF, 2)
    assert (first.sample_ids, second.sample_ids) == (SAMPLES[:1], SAMPLES[1:3])
    assert first.epoch < second.epoch
    assert first.seconds == RULES.lease_seconds
    assert (await leased(run, VALUE)).sample_ids == SAMPLES
    assert (await leased(run, REF)).sample_ids == SAMPLES[3:]
    assert await store.columns.lease(run.run_id, REF, (), 512, "nonce") is None


async def test_a_repeated_lease_is_the_same_lease(store: Store) -> None:
    """By its nonce, as long as it holds cells; then the next ones are leased."""
    run = await waiting_run(store)
    lease = store.columns.lease
    first = await lease(run.run_id, REF, (), 2, "nonce")
    again = await lease(run.run_id, REF, (), 2, "nonce")
    assert first is not None and again is not None
    assert first.sample_ids == SAMPLES[:2]
    assert (again.sample_ids, again.epoch) == (first.sample_ids, first.epoch)
    assert 0 < again.seconds <= first.seconds
    other = await lease(run.run_id, REF, (), 1, "other")
    assert other is not None
    assert other.sample_ids == SAMPLES[2:3]
    await write(run, REF, first)
    next_one = await lease(run.run_id, REF, (), 2, "nonce")
    assert next_one is not None
    assert next_one.sample_ids == SAMPLES[3:]


async def test_a_lease_that_is_over_is_not_repeated(store: Store) -> None:
    """Its cells are leased again, under a new epoch."""
    run = await waiting_run(store, lease_seconds=0.05)
    first = await store.columns.lease(run.run_id, REF, (), 2, "nonce")
    assert first is not None
    await asyncio.sleep(0.1)
    again = await store.columns.lease(run.run_id, REF, (), 4, "nonce")
    assert again is not None
    assert again.epoch > first.epoch


async def test_a_column_waits_for_those_it_needs(store: Store) -> None:
    """Only samples that have the needed column are leased, wherever they are in the queue."""
    run = await waiting_run(store)
    assert await store.columns.lease(run.run_id, VALUE, (REF,), 512, "nonce") is None
    first, second = await leased(run, REF, 2), await leased(run, REF, 1)
    await write(run, REF, second)
    assert (await leased(run, VALUE, needs=(REF,))).sample_ids == SAMPLES[2:3]
    await write(run, REF, first)
    assert (await leased(run, VALUE, needs=(REF,))).sample_ids == SAMPLES[:2]


async def test_a_write_is_idempotent(store: Store) -> None:
    """The first value stays, also after the group is ready; another value is rejected."""
    run = await waiting_run(store)
    lease = await leased(run, REF)
    assert (await write(run, REF, lease)).num_written == 4
    assert await write(run, REF, lease) == WriteColumnResponse(num_written=0, num_ready_groups=0)
    await write(run, VALUE, await leased(run, VALUE))
    found = await store.columns.leased(run.run_id, REF, lease.epoch, SAMPLES)
    assert (found.unwritten, found.unneeded) == ((), ())
    await put(run, REF, lease, 1.0, new=False)
    await refused(Reason.ALREADY_EXISTS, put(run, REF, lease, 2.0, new=False))
    assert (await store.columns.complete(run.run_id, REF, lease.epoch, SAMPLES)).num_written == 0
    assert await stored(run, SAMPLES[0]) == {REF: 1.0, VALUE: 1.0}


async def test_a_late_write_is_rejected(store: Store) -> None:
    """A lease that is over proves nothing: the next consumer gets its cells, whose value stands."""
    run = await waiting_run(store, lease_seconds=0.4)
    slow = await leased(run, REF)
    await put(run, REF, slow, 7.0)
    quick = await leased(run, REF)
    assert quick.sample_ids == SAMPLES
    await refused(Reason.LEASE_EXPIRED, write(run, REF, slow, 7.0))
    late = store.columns.complete(run.run_id, REF, slow.epoch, SAMPLES)
    await refused(Reason.LEASE_EXPIRED, late)
    await write(run, REF, quick, 1.0)
    await refused(Reason.LEASE_EXPIRED, write(run, REF, slow, 7.0))
    await refused(Reason.LEASE_EXPIRED, put(run, REF, slow, 7.0))
    assert await stored(run, SAMPLES[0]) == {REF: 1.0}


async def test_without_the_fence_two_consumers_write(redis_url: str, tmp_path: Path) -> None:
    """Negative control: the same late write is accepted, and what stands changes."""
    cuts = {
        "_cells": "string.match(cell, '^%d+ (%d+)$') ~= epoch or expires <= now",
        "write_cell": "by > given or (by < given and new ~= '1')",
    }
    for path in SCRIPTS.glob("*.lua"):
        source, fence = path.read_text(), cuts.get(path.stem, "")
        assert source.count(fence) == 1 or not fence
        (tmp_path / path.name).write_text(source.replace(fence, "false") if fence else source)
    async with redis_store(redis_url, Durability.FAST, 5.0, tmp_path) as store:
        run = await waiting_run(store, lease_seconds=0.4)
        slow = await leased(run, REF)
        quick = await leased(run, REF)
        assert (await write(run, REF, quick, 1.0)).num_written == 4
        assert (await write(run, REF, slow, 7.0)).num_written == 4
        assert await stored(run, SAMPLES[0]) == {REF: 7.0}


async def test_many_consumers_write_each_cell_once(store: Store) -> None:
    """With any order of leases, every cell is written once and every group becomes ready."""
    run = await waiting_run(store, max_staleness=7, group_size=4)
    await run.submit(*(f"more-{i}" for i in range(6)))
    await run.fill()
    written: dict[tuple[str, str], int] = {}

    async def consumer(column: str, needs: tuple[str, ...]) -> None:
        while len(written) < 32:
            lease = await store.columns.lease(run.run_id, column, needs, 3, uuid.uuid4().hex)
            if lease is None:
                await asyncio.sleep(0.001)
                continue
            counted = await write(run, column, lease)
            assert counted.num_written == len(lease.sample_ids)
            for name in lease.sample_ids:
                written[column, name] = written.get((column, name), 0) + 1

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(consumer(REF, ()))
            group.create_task(consumer(VALUE, (REF,)))
    assert set(written.values()) == {1}
    counts = await store.runs.run_counts(run.run_id)
    assert (counts.num_ready_groups, counts.num_incomplete_groups) == (8, 0)


async def test_status_shows_what_is_ready_and_who_holds_it(store: Store) -> None:
    """Per sample of a complete, uncommitted group: columns written and leased, and its step."""
    run = await waiting_run(store)
    await write(run, REF, await leased(run, REF))
    await write(run, VALUE, await leased(run, VALUE, 2))
    await leased(run, VALUE, 1)
    epoch = (await store.ledger.reconcile(run.run_id, 0, "trainer")).epoch
    await store.ledger.lease_samples(run.run_id, epoch, 1, 0, 1)
    rows = await store.columns.status(run.run_id, "", 10)
    assert [(row.sample_id, row.group_id) for row in rows] == [(s, s[0]) for s in SAMPLES]
    assert [list(row.ready_columns) for row in rows] == [[REF, VALUE]] * 2 + [[REF]] * 2
    assert [list(row.leased_columns) for row in rows] == [[], [], [VALUE], []]
    assert [row.leased_step for row in rows] == [1, 1, 0, 0]
    assert await store.columns.status(run.run_id, "", 1) == rows[:2]
    assert await store.columns.status(run.run_id, "a", 1) == rows[2:]
    await store.ledger.commit(run.run_id, epoch, 1)
    assert await store.columns.status(run.run_id, "", 10) == rows[2:]


async def test_cells_of_ready_groups_are_gone(redis_url: str) -> None:
    """Nothing of a group stays behind in the run once all its columns are written."""
    async with redis_store(redis_url, Durability.FAST, 5.0) as store:
        run = await waiting_run(store)
        for column in (REF, VALUE):
            await write(run, column, await leased(run, column))
        names = [key for key in keys.run_keys(run.run_id) if ":cell" in key]
        assert len(names) == 3
        redis = Redis.from_url(redis_url)
        assert await redis.exists(*names) == 0
        await redis.aclose()


async def refused(reason: Reason, call: Any) -> None:
    """The call fails with `reason`."""
    with pytest.raises(ServiceError) as caught:
        await call
    assert caught.value.reason is reason


@pytest.fixture
async def caller(store: Store) -> AsyncIterator[client.Client]:
    """A client of a replica, with a run whose samples need two columns."""
    async with (
        running_manager(store) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        made = client.Client(channel, uuid.uuid4().hex)
        rules = trajectory_pb2.RunConfig(required_columns=[REF, VALUE])
        rules.MergeFrom(client.RULES)
        await made.create_run(rules)
        yield made


async def test_columns_over_grpc(caller: client.Client) -> None:
    """Consumers get packed samples with what they need, and the trainer gets all columns."""
    stub = async_stub(ColumnServiceStub, caller.channel)
    await caller.submit("a")
    for _ in range(2):
        await caller.play()

    async def lease(column: str, *needs: str) -> pb.LeaseColumnResponse:
        request = pb.LeaseColumnRequest(
            run_id=caller.run_id, column=column, max_samples=8, request_id=uuid.uuid4().hex
        )
        request.needs.extend(needs)
        request.wait.FromSeconds(5)
        return await stub.LeaseColumn(request)

    async def answer(
        column: str, given: pb.LeaseColumnResponse, *values: float
    ) -> pb.WriteColumnResponse:
        request = pb.WriteColumnRequest(
            run_id=caller.run_id, column=column, lease_token=given.lease_token
        )
        for sample in given.samples:
            request.values.add(sample_id=sample.sample_id, values=pack_logprobs(values))
        return await stub.WriteColumn(request)

    given = await lease(REF)
    assert [len(sample.tokens.token_ids) for sample in given.samples] == [24, 24]
    assert given.lease_duration.seconds == 60
    for bad in ((1.0, 2.0), (float("nan"),), ()):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer(REF, given, *bad)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await answer(REF, given, *range(6))).num_written == 2
    given = await lease(VALUE, REF)
    assert [column.name for column in given.samples[0].columns] == [REF]
    assert list(unpack_logprobs(given.samples[0].columns[0].values)) == list(range(6))
    written = await answer(VALUE, given, 0.25)
    assert (written.num_written, written.num_ready_groups) == (2, 1)
    assert (await answer(VALUE, given, 0.25)).num_written == 0
    status = await stub.ListSampleStatus(pb.ListSampleStatusRequest(run_id=caller.run_id))
    assert [list(row.ready_columns) for row in status.samples] == [[REF, VALUE]] * 2
    epoch = await caller.reconcile()
    step = await caller.lease_samples(epoch, 1, wait=5)
    columns = {column.name: unpack_logprobs(column.values) for column in step.samples[1].columns}
    assert {name: len(values) for name, values in columns.items()} == {REF: 6, VALUE: 1}


async def test_only_required_columns_are_leased(caller: client.Client) -> None:
    """A name that the run does not know is an error that lists those it knows."""
    stub = async_stub(ColumnServiceStub, caller.channel)
    request = pb.LeaseColumnRequest(
        run_id=caller.run_id, column="reff", max_samples=1, request_id="r"
    )
    with pytest.raises(grpc.aio.AioRpcError, match=f"{REF}, {VALUE}") as caught:
        await stub.LeaseColumn(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
