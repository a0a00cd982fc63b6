"""One suite for every store."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from scheduler.draft import Draft
from scheduler.memory_store import MemoryStore
from scheduler.policy import PreemptivePolicy
from scheduler.records import AllocationEvent, State
from scheduler.redis_store import RedisStore
from scheduler.store import Store, SupersededError
from services.chassis.redis import connect
from tests.scheduler.support import BOTH, RUN, gang, node

MAX_EVENTS = 5


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """An empty store of each kind."""
    if request.param == "memory":
        yield MemoryStore(MAX_EVENTS)
        return
    redis: Redis = connect(request.getfixturevalue("redis_url"))
    for key in await redis.keys("sf:scheduler:*"):
        await redis.delete(key)
    opened = RedisStore(redis, MAX_EVENTS)
    yield opened
    await opened.close()


async def test_commit_is_what_load_gives(store: Store) -> None:
    """Nodes, gangs and counters come back as they were, also after one of each went away."""
    incarnation = await store.open()
    state, events = _busy(State())
    await store.commit(incarnation, State(), state, events)
    assert await store.load() == state
    released, events = _released(state)
    await store.commit(incarnation, state, released, events)
    assert await store.load() == released


async def test_audit_log_is_resumable_and_bounded(store: Store) -> None:
    """Events come in order after any sequence, and the oldest go."""
    incarnation = await store.open()
    state, events = _busy(State())
    await store.commit(incarnation, State(), state, events)
    kept = events[-MAX_EVENTS:]
    assert await store.events(0, 100) == kept
    assert await store.events(kept[1].sequence, 2) == kept[2:4]
    assert await store.events(kept[-1].sequence, 100) == []


async def test_superseded_scheduler_cannot_write(store: Store) -> None:
    """Only the newest incarnation commits; the refused commit leaves no trace."""
    old, new = await store.open(), await store.open()
    assert new > old
    assert not await store.is_newest(old)
    state, events = _busy(State())
    with pytest.raises(SupersededError):
        await store.commit(old, State(), state, events)
    assert await store.load() == State()
    assert await store.events(0, 100) == []
    await store.commit(new, State(), state, events)
    assert await store.load() == state


async def test_store_answers(store: Store) -> None:
    """A running store is reachable."""
    assert await store.reachable()


def _busy(state: State) -> tuple[State, list[AllocationEvent]]:
    draft = Draft(state, PreemptivePolicy(), 1.5)
    draft.register(node("a", *BOTH, train_priority=0.25))
    draft.register(node("b", "rollout"))
    draft.request(gang('odd "name"', 1, needed_time=1.0))
    draft.request(gang("large", 9))
    assert len(draft.events) >= MAX_EVENTS
    return draft.state, draft.events


def _released(state: State) -> tuple[State, list[AllocationEvent]]:
    draft = Draft(state, PreemptivePolicy(), 2.5)
    draft.release((RUN, 'odd "name"'))
    return draft.state, draft.events
