"""Commits that fail, commits of unknown outcome, and schedulers that were replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from scheduler.model.records import AllocationEvent, NodeState, State
from scheduler.policy.allocation_policy import PreemptivePolicy
from scheduler.pool.node_leases import NodeLeases
from scheduler.pool.pool import Pool
from services.chassis.errors import DependencyUnavailable, Reason, ServiceError, unavailable
from tests.lib.scheduler.memory_store import MemoryStore
from tests.lib.scheduler.support import BOTH, gang, node

MARGIN = 2.0


class FlakyStore(MemoryStore):
    """Loses the answers of selected commits, before or after they happened."""

    def __init__(self) -> None:
        super().__init__(max_events=100)
        self.failing = ""
        self.reachable_now = asyncio.Event()
        self.reachable_now.set()

    async def is_newest(self, incarnation: int) -> bool:
        """See `Store.is_newest`."""
        if self.failing:
            raise unavailable(Reason.STORE_UNAVAILABLE, "nobody answered")
        return await super().is_newest(incarnation)

    async def commit(
        self, incarnation: int, before: State, after: State, events: Sequence[AllocationEvent]
    ) -> None:
        """See `Store.commit`."""
        await self.reachable_now.wait()
        if self.failing != "before":
            await super().commit(incarnation, before, after, events)
        if self.failing:
            raise unavailable(Reason.STORE_UNAVAILABLE, "the answer was lost")


@pytest.mark.parametrize("failing", ["before", "after"])
async def test_unknown_commit_is_read_again(failing: str) -> None:
    """Whether or not a commit without an answer happened, the next step starts from the truth."""
    store = FlakyStore()
    pool = await _open(store)
    first = await pool.register(node("a", *BOTH))
    store.failing = failing
    with pytest.raises(ServiceError):
        await pool.change(lambda tx: tx.request(gang("g", 1)))
    assert pool.state.nodes["a"].assignment == first.assignment, "told nobody"
    store.failing = ""
    await pool.change(lambda tx: tx.request(gang("g", 1)))
    assert pool.state == await store.load()
    assert pool.state.nodes["a"].assignment.tag == "train"
    assert pool.state.nodes["a"].assignment.epoch == first.assignment.epoch + 1


async def test_heartbeats_need_no_store() -> None:
    """An outage of the store costs no node its lease: a report without news writes nothing."""
    store = FlakyStore()
    pool = await _open(store)
    epoch = (await pool.register(node("a", *BOTH))).assignment.epoch
    await pool.heartbeat("a", NodeState.ACTIVE, epoch, epoch)
    store.failing = "before"
    await pool.heartbeat("a", NodeState.ACTIVE, epoch, epoch)
    await pool.sweep()
    assert pool.state.nodes["a"].taken_up


async def test_leases_end_when_the_store_is_gone_for_longer_than_the_margin() -> None:
    """Another scheduler may have taken over and reassigned these nodes' work."""
    store, now = FlakyStore(), [0.0]
    pool = await _open(store, lease_now=now)
    epoch = (await pool.register(node("a", *BOTH))).assignment.epoch
    store.failing = "before"
    for now[0] in (0.0, MARGIN):
        await pool.sweep()
        await pool.heartbeat("a", NodeState.IDLE, 0, epoch)
    now[0] = MARGIN + 1
    await pool.sweep()
    with pytest.raises(ServiceError) as caught:
        await pool.heartbeat("a", NodeState.IDLE, 0, epoch)
    assert caught.value.reason is Reason.STORE_UNAVAILABLE
    store.failing = ""
    await pool.sweep()
    await pool.heartbeat("a", NodeState.IDLE, 0, epoch)


async def test_a_change_outlives_its_caller() -> None:
    """A cancelled heartbeat must not leave a commit behind that lands after the next one."""
    store = FlakyStore()
    pool = await _open(store)
    epoch = (await pool.register(node("a", *BOTH))).assignment.epoch
    store.reachable_now.clear()
    caller = asyncio.create_task(pool.heartbeat("a", NodeState.ACTIVE, epoch, epoch))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait({caller})
    store.reachable_now.set()
    await pool.change(lambda tx: tx.request(gang("g", 1)))
    assert pool.state == await store.load()
    numbers = [event.sequence for event in await store.events(0, 100)]
    assert numbers == sorted(set(numbers))
    assert NodeState.ACTIVE in {e.node.state for e in await store.events(0, 100) if e.node}


async def test_a_watcher_gets_no_event_twice_during_a_commit() -> None:
    """The log already holds what the pool does not count yet; that is no store that lost events."""
    store = FlakyStore()
    pool = await _open(store)
    await pool.register(node("a", *BOTH))
    await pool.register(node("b", *BOTH))
    seen = pool.state.last_sequence
    store.reachable_now.clear()
    change = asyncio.create_task(pool.change(lambda tx: tx.request(gang("g", 2))))
    await asyncio.sleep(0)
    watcher = asyncio.create_task(pool.next_events(seen + 1))
    await asyncio.sleep(0)
    store.reachable_now.set()
    await change
    assert [event.sequence for event in await watcher][:1] == [seen + 2]


async def test_replaced_scheduler_refuses_and_ends() -> None:
    """Frozen while another took over: it changes nothing, its callers retry, and it goes away."""
    store = FlakyStore()
    old = await _open(store)
    await old.register(node("a", *BOTH))
    new = await _open(store)
    with pytest.raises(ServiceError) as caught:
        await old.change(lambda tx: tx.request(gang("g", 1)))
    assert caught.value.reason is Reason.STORE_UNAVAILABLE
    with pytest.raises(DependencyUnavailable):
        await old.sweep()
    await new.change(lambda tx: tx.request(gang("g", 1)))
    assert new.state.nodes["a"].assignment.tag == "train"


async def test_deadline_starts_again_with_the_scheduler() -> None:
    """While it was away no node could learn of its new work: everybody gets the time once more."""
    store, now = FlakyStore(), [0.0]
    old = await _open(store, now)
    for name in "ab":
        epoch = (await old.register(node(name, *BOTH))).assignment.epoch
        await old.heartbeat(name, NodeState.ACTIVE, epoch, epoch)
    await old.change(lambda tx: tx.request(gang("g", 1)))
    now[0] = 1000.0
    new = await _open(store, now)
    for later, name in ((0.0, "a"), (59.0, "a"), (60.0, "b")):
        now[0] = 1000.0 + later
        await new.sweep()
        assert [entry.node_id for entry in new.state.members(gang("g", 1))] == [name]


async def _open(
    store: MemoryStore, now: Sequence[float] = (0.0,), lease_now: Sequence[float] = (0.0,)
) -> Pool:
    pool = Pool(
        store=store,
        policy=PreemptivePolicy(),
        leases=NodeLeases(10.0, MARGIN, lambda: lease_now[0]),
        clock=lambda: now[0],
        leave_seconds=60.0,
    )
    await pool.open()
    return pool
