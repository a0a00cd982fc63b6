"""A client behind Sentinels: it talks to the current master, whatever becomes of the old one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from redis import exceptions
from redis.asyncio import Redis

from services.chassis.errors import Reason, ServiceError
from services.chassis.redis import connect as store
from services.chassis.redis.pipeline import Pipelines
from tests.lib.redis_sentinel import RedisSentinel


@pytest.fixture(scope="module")
def sentinel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisSentinel]:
    """A master, two replicas and three Sentinels; any of the servers may be the master."""
    group = RedisSentinel(tmp_path_factory.mktemp("sentinel"))
    group.start()
    yield group
    group.stop()


@pytest.fixture
async def redis(sentinel: RedisSentinel) -> AsyncIterator[Redis]:
    """A client with an open connection to the master."""
    async with store.connect(sentinel.url) as client:
        await client.set("n", 1)
        yield client


async def test_it_leaves_a_master_that_was_replaced(sentinel: RedisSentinel, redis: Redis) -> None:
    """Even one that does not know: frozen during the failover, it wakes up and answers."""
    old = sentinel.master()
    pipelines = Pipelines(redis)
    pipeline = await pipelines.of("n")
    first = await pipeline.run_id()
    async with Redis(port=old.port) as control:
        old.freeze()
        await asyncio.to_thread(sentinel.wait_for_master_other_than, old)
        old.thaw()
        assert await control.set("n", "lost"), "the old master accepts writes that will be lost"
    assert await redis.set("n", 2)
    (refused,) = await pipeline.execute([("INCR", "n")], first)
    assert isinstance(refused, exceptions.ConnectionError), "made for the old master"
    assert await pipeline.execute([("INCR", "n")]) == [3]
    assert await pipeline.run_id() != first
    async with Redis(port=sentinel.master().port) as master:
        assert await master.get("n") == b"3"
    await pipelines.aclose()


async def test_the_master_stays_in_use_while_the_sentinels_are_away(
    sentinel: RedisSentinel, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a new connection needs one of them; the master that is known keeps working."""
    monkeypatch.setattr("services.chassis.redis.sentinel._REFRESH_SECONDS", 0.0)
    sentinel.kill_sentinels()
    assert await redis.incr("n") == 2
    assert await redis.incr("n") == 3
    async with store.connect(sentinel.url) as newcomer:
        with pytest.raises(ServiceError) as caught, store.store_errors("get"):
            await newcomer.get("n")
        assert caught.value.reason is Reason.STORE_UNAVAILABLE
        sentinel.start_sentinels()
        assert await newcomer.get("n") == b"3"


async def test_an_unknown_service_is_unavailable(sentinel: RedisSentinel) -> None:
    """UNAVAILABLE, as it may be a Sentinel that has just started."""
    url = sentinel.url.replace("/seamflow/", "/other/")
    async with store.connect(url) as redis:
        with pytest.raises(ServiceError) as caught, store.store_errors("get"):
            await redis.get("n")
    assert caught.value.reason is Reason.STORE_UNAVAILABLE
