"""One suite for every store."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from scheduler.model.lending_state import BatchForecast
from scheduler.model.records import AllocationEvent, Assignment, Hardware, RunPolicy, State, Worker
from scheduler.policy.allocation_policy import PreemptivePolicy
from scheduler.pool.state_transaction import StateTransaction
from scheduler.store import redis_store
from scheduler.store.redis_store import RedisStore, SupersededError
from services.chassis.redis.connect import connect
from tests.lib.scheduler.memory_store import MemoryStore
from tests.lib.scheduler.support import BOTH, RUN, gang, node

MAX_EVENTS = 5
OWN = {"tag": "train", "address": "x:2"}
OLD_NODE = (
    '{"node_id":"a","run_id":"run","capability_tags":["rollout","train"],'
    '"workers":[{"tag":"train","address":"127.0.0.1:9"}],"train_priority":0.0,'
    '"assignment":{"tag":"train","epoch":7,"gang_id":"g","lent":false,"rank_offset":0,'
    '"world_size":1},"registered_epoch":2,"state":"active","reported_epoch":7,"draining":false,'
    '"leaving":false,"released_time":null}'
)
OLD_GANG = (
    '{"run_id":"run","gang_id":"g","tag":"train","num_nodes":1,"arrival":2,"needed_time":null}'
)
OLD_EVENT = (
    '{"sequence":5,"time":1.0,"node":' + OLD_NODE + ',"kind":"assigned","cause":"gang g requested"}'
)
"""As scheduler 0.1.0 wrote them."""


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[RedisStore]:
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


async def test_commit_is_what_load_gives(store: RedisStore) -> None:
    """All of the state comes back as it was, also after a part of it went away."""
    incarnation = await store.open()
    state, events = _busy(State())
    await store.commit(incarnation, State(), state, events)
    assert await store.load() == state
    released, events = _released(state)
    await store.commit(incarnation, state, released, events)
    assert await store.load() == released


async def test_audit_log_is_resumable_and_bounded(store: RedisStore) -> None:
    """Events come in order after any sequence, and the oldest go."""
    incarnation = await store.open()
    state, events = _busy(State())
    await store.commit(incarnation, State(), state, events)
    kept = events[-MAX_EVENTS:]
    assert await store.events(0, 100) == kept
    assert await store.events(kept[1].sequence, 2) == kept[2:4]
    assert await store.events(kept[-1].sequence, 100) == []


async def test_superseded_scheduler_cannot_write(store: RedisStore) -> None:
    """Only the newest incarnation commits; a rejected commit changes nothing."""
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


async def test_state_of_an_older_scheduler_is_taken_over(redis_url: str) -> None:
    """What 0.1.0 wrote loads with defaults for what it did not know; its work goes on."""
    redis: Redis = connect(redis_url)
    for key in await redis.keys("sf:scheduler:*"):
        await redis.delete(key)
    await redis.hset(
        redis_store.COUNTERS, mapping={"incarnation": 3, "last_epoch": 7, "last_arrival": 2}
    )
    await redis.hset(redis_store.NODES, "a", OLD_NODE)
    await redis.hset(redis_store.GANGS, '["run", "g"]', OLD_GANG)
    await redis.zadd(redis_store.EVENTS, {OLD_EVENT: 5})
    opened = RedisStore(redis, MAX_EVENTS)
    incarnation = await opened.open()
    state = await opened.load()
    assert state.nodes["a"].assignment == Assignment(
        tag="train", epoch=7, gang_id="g", rank_offset=0, world_size=1
    )
    assert state.nodes["a"].workers == (Worker(tag="train", address="127.0.0.1:9"),)
    assert state.granted(state.gangs[RUN, "g"])
    assert [event.kind for event in await opened.events(0, 9)] == ["assigned"]
    tx = StateTransaction(state, PreemptivePolicy(), 2.0)
    tx.replan("time passed")
    assert tx.state == state, "running work is not touched"
    assert tx.events == []
    tx.release((RUN, "g"))
    await opened.commit(incarnation, state, tx.state, tx.events)
    assert await opened.load() == tx.state
    await opened.close()


async def test_store_answers(store: RedisStore) -> None:
    """A running store is reachable."""
    assert await store.reachable()


def _busy(state: State) -> tuple[State, list[AllocationEvent]]:
    tx = StateTransaction(state, PreemptivePolicy(), 1.5)
    tx.register(
        node(
            "a",
            *BOTH,
            train_priority=0.25,
            workers=(Worker(tag="train", address="x:1", run_id="other"), Worker(**OWN)),
            hardware=Hardware(flops=1e15, device_bytes=80 << 30),
            switch_seconds={"train": 2.5},
        )
    )
    tx.register(node("b", "rollout"))
    tx.set_run_policy("other", RunPolicy(priority=-1, max_nodes=2, rollout_share=0.5))
    for _ in range(2):
        tx.request(gang("judged", 1))
        tx.release((RUN, "judged"), BatchForecast(remaining_rollouts=1, batch_rollouts=3))
    tx.request(gang('odd "name"', 1, needed_time=1.0))
    tx.request(gang("large", 9))
    assert len(tx.events) >= MAX_EVENTS
    return tx.state, tx.events


def _released(state: State) -> tuple[State, list[AllocationEvent]]:
    tx = StateTransaction(state, PreemptivePolicy(), 2.5)
    tx.release((RUN, 'odd "name"'))
    return tx.state, tx.events
