"""One suite for every implementation of the weights store."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator

import pytest
from seamflow.weights.v1.weight_service_pb2 import Manifest, WeightFile

from services.chassis.errors import Reason, ServiceError
from services.chassis.redis.connect import connect
from services.weights import keys
from services.weights.keys import Allocation, Publish, Scope
from services.weights.redis_store import RedisStore
from tests.lib.weights.memory_store import memory_store

HUGE_EPOCH = 2**62


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[RedisStore]:
    """An empty store of each kind."""
    if request.param == "memory":
        yield memory_store()
        return
    redis_store = RedisStore(connect(request.getfixturevalue("redis_url")))
    yield redis_store
    await redis_store.close()


@pytest.fixture
def scope() -> Scope:
    """A run of the test's own."""
    return Scope(run_id=uuid.uuid4().hex, model="policy")


def publish(key: str, *, step: int = 1, epoch: int = 1) -> Publish:
    """A wish to publish `step`."""
    return Publish(key=key, step=step, parent=step - 1, epoch=epoch)


def manifest(scope: Scope, version: int, name: str = "a") -> Manifest:
    """A manifest of one file."""
    return Manifest(run_id=scope.run_id, weight_version=version, files=[WeightFile(name=name)])


async def commit(store: RedisStore, scope: Scope, count: int) -> None:
    """Allocate and commit `count` versions."""
    for step in range(1, count + 1):
        version = await store.begin(scope, publish(f"key-{step}", step=step), 0)
        await store.commit(scope, 1, manifest(scope, version))


async def test_versions_grow_by_one_from_one(store: RedisStore, scope: Scope) -> None:
    """The first version is 1, each next key gets the next number."""
    versions = [await store.begin(scope, publish(f"key-{i}"), 0) for i in range(3)]
    assert versions == [1, 2, 3]


async def test_parallel_begins_get_different_versions(store: RedisStore, scope: Scope) -> None:
    """No number is given out twice however the calls interleave."""
    wishes = [store.begin(scope, publish(f"key-{i}"), 0) for i in range(20)]
    assert sorted(await asyncio.gather(*wishes)) == list(range(1, 21))


async def test_the_same_key_gets_the_same_version(store: RedisStore, scope: Scope) -> None:
    """A repeated begin changes nothing; another payload under the key is an error."""
    assert await store.begin(scope, publish("key"), 0) == 1
    assert await store.begin(scope, publish("key"), 0) == 1
    with pytest.raises(ServiceError) as refused:
        await store.begin(scope, publish("key", step=2), 0)
    assert refused.value.reason is Reason.ALREADY_EXISTS
    assert await store.begin(scope, publish("next"), 0) == 2


async def test_a_version_lies_above_the_floor(store: RedisStore, scope: Scope) -> None:
    """What is already on disk is never allocated, even by a store that knows nothing of it."""
    assert await store.begin(scope, publish("a"), 7) == 8
    assert await store.begin(scope, publish("b"), 3) == 9


async def test_scopes_do_not_share_numbers(store: RedisStore, scope: Scope) -> None:
    """Two models of a run count for themselves."""
    other = Scope(run_id=scope.run_id, model="critic")
    assert await store.begin(scope, publish("a"), 0) == 1
    assert await store.begin(other, publish("a"), 0) == 1
    await store.commit(other, 1, manifest(other, 1))
    assert (await store.newest(scope), await store.newest(other)) == (0, 1)


@pytest.mark.parametrize("new", [2, HUGE_EPOCH + 1])
async def test_an_older_epoch_can_neither_begin_nor_upload_nor_commit(
    store: RedisStore, scope: Scope, new: int
) -> None:
    """Once a newer trainer was seen the older one is fenced, exactly, up to 63 bits."""
    old = new - 1
    version = await store.begin(scope, publish("a", epoch=old), 0)
    await store.begin(scope, publish("b", epoch=new), 0)
    for attempt in (
        store.begin(scope, publish("c", epoch=old), 0),
        store.fence(scope, old, version),
        store.commit(scope, old, manifest(scope, version)),
    ):
        with pytest.raises(ServiceError) as refused:
            await attempt
        assert refused.value.reason is Reason.STALE_EPOCH
        assert refused.value.metadata["current_epoch"] == str(new)
    assert await store.newest(scope) == 0


async def test_the_current_epoch_is_not_fenced(store: RedisStore, scope: Scope) -> None:
    """Control of the fence: the same calls pass with the epoch that is current."""
    version = await store.begin(scope, publish("a", epoch=1), 0)
    await store.begin(scope, publish("b", epoch=2), 0)
    await store.commit(scope, 2, manifest(scope, version))
    assert await store.newest(scope) == version


async def test_a_commit_raises_the_fence(store: RedisStore, scope: Scope) -> None:
    """A newer trainer that commits first fences the older one just as well."""
    version = await store.begin(scope, publish("a", epoch=1), 0)
    await store.commit(scope, 2, manifest(scope, version))
    with pytest.raises(ServiceError):
        await store.begin(scope, publish("b", epoch=1), 0)


async def test_an_allocated_version_is_not_visible(store: RedisStore, scope: Scope) -> None:
    """Only a commit makes a version appear; its step and parent are known before."""
    version = await store.begin(scope, publish("a", step=5), 0)
    assert await store.manifest(scope, version) is None
    assert await store.newest(scope) == 0
    assert await store.allocation(scope, version) == Allocation(step=5, parent=4)


async def test_the_first_commit_wins(store: RedisStore, scope: Scope) -> None:
    """A second commit of a version answers with the first one's manifest."""
    version = await store.begin(scope, publish("a"), 0)
    first = await store.commit(scope, 1, manifest(scope, version, "first"))
    again = await store.commit(scope, 1, manifest(scope, version, "second"))
    assert first == again == await store.manifest(scope, version)
    assert again.files[0].name == "first"


async def test_only_allocated_versions_are_uploaded(store: RedisStore, scope: Scope) -> None:
    """The fence checks the version too, raises no epoch, and lets a repeated check pass."""
    version = await store.begin(scope, publish("a"), 0)
    await store.fence(scope, 1, version)
    await store.fence(scope, 9, version)
    await store.fence(scope, 1, version)
    with pytest.raises(ServiceError) as refused:
        await store.fence(scope, 1, version + 1)
    assert refused.value.reason is Reason.NOT_FOUND


async def test_only_allocated_versions_are_committed(store: RedisStore, scope: Scope) -> None:
    """A version that was never given out cannot appear."""
    with pytest.raises(ServiceError) as refused:
        await store.commit(scope, 1, manifest(scope, 9))
    assert refused.value.reason is Reason.NOT_FOUND


async def test_newest_never_goes_back(store: RedisStore, scope: Scope) -> None:
    """Committing an older allocation late leaves the newest where it is."""
    old = await store.begin(scope, publish("a"), 0)
    new = await store.begin(scope, publish("b"), 0)
    await store.commit(scope, 1, manifest(scope, new))
    await store.commit(scope, 1, manifest(scope, old))
    assert await store.newest(scope) == new


async def test_forget_keeps_the_newest_committed(store: RedisStore, scope: Scope) -> None:
    """Old versions and holes go, the newest stay, and no number comes back."""
    await commit(store, scope, 3)
    hole = await store.begin(scope, publish("hole"), 0)
    last = await store.begin(scope, publish("last"), 0)
    await store.commit(scope, 1, manifest(scope, last))
    assert await store.forget(scope, 2) == 3
    known = [v for v in range(1, last + 1) if await store.allocation(scope, v)]
    assert known == [3, hole, last]
    assert [v for v in range(1, last + 1) if await store.manifest(scope, v)] == [3, last]
    assert await store.begin(scope, publish("key-1"), 0) == last + 1


async def test_forget_without_versions_is_a_no_op(store: RedisStore, scope: Scope) -> None:
    """With nothing or too little committed all of it is kept."""
    assert await store.forget(scope, 4) == 0
    await commit(store, scope, 2)
    assert await store.forget(scope, 4) == 1


async def test_members_of_a_group_come_and_go(store: RedisStore, scope: Scope) -> None:
    """Who joins is in until it leaves; to leave twice, or without having joined, is no error."""
    await asyncio.gather(*(store.join(scope, "relays", f"s{n}", ttl=60) for n in range(3)))
    await store.leave(scope, "relays", "s1")
    await store.leave(scope, "relays", "was never in")
    assert await store.members(scope, "relays") == ["s0", "s2"]


async def test_a_silent_member_expires(store: RedisStore, scope: Scope) -> None:
    """A membership that is not extended ends: a crashed server is no source."""
    await store.join(scope, "relays", "dead", ttl=60)
    await store.join(scope, "relays", "next", ttl=60)
    await store.join(scope, "relays", "dead", ttl=0.02)
    async with asyncio.timeout(10):
        while await store.members(scope, "relays") != ["next"]:
            await asyncio.sleep(0.01)


async def test_a_lost_script_cache_is_refilled(redis_url: str, scope: Scope) -> None:
    """A Redis that has forgotten its scripts is taught again in the same call."""
    redis = connect(redis_url)
    store = RedisStore(redis)
    await store.begin(scope, publish("a"), 0)
    await redis.script_flush()
    assert await store.begin(scope, publish("b"), 0) == 2
    await store.close()


def test_all_keys_of_a_scope_share_a_slot(scope: Scope) -> None:
    """Every key carries the run as its only hash tag, so scripts work on a cluster."""
    for key in (keys.counters, keys.publishes, keys.allocations, keys.manifests):
        assert key(scope).startswith(f"sf:weights:{{{scope.run_id}}}:policy:")
    assert keys.members(scope, "g").startswith(f"sf:weights:{{{scope.run_id}}}:policy:")
