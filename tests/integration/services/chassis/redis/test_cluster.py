"""Redis Cluster: commands, scripts and pipelines reach the node that owns their slot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import exceptions
from redis.asyncio import Redis
from redis.crc import key_slot

from services.chassis.errors import Reason, ServiceError
from services.chassis.redis import connect as store
from services.chassis.redis.pipeline import Pipelines
from services.chassis.redis.scripts import Scripts
from tests.lib.redis_cluster import RedisCluster

COUNT = "return redis.call('INCRBY', KEYS[1], ARGV[1])"


@pytest.fixture
async def redis(redis_cluster: RedisCluster) -> AsyncIterator[Any]:
    """A client of the empty cluster."""
    async with store.connect(redis_cluster.url) as client:
        await client.flushall(target_nodes="primaries")
        yield client


class Move:
    """Moves the slot of one key from its node to another, step by step, as an operator does."""

    def __init__(self, cluster: RedisCluster, key: str) -> None:
        self.key, self.slot = key, key_slot(key.encode())
        self._clients = [Redis(port=node.port, decode_responses=True) for node in cluster.nodes]
        self._ports = [node.port for node in cluster.nodes]

    async def begin(self) -> None:
        """New keys go to the target from now on; clients get ASK."""
        self._ids = [await client.cluster("myid") for client in self._clients]
        owner = next(
            row[2][1]
            for row in await self._clients[0].execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
            if row[0] <= self.slot <= row[1]
        )
        self._source = self._ports.index(owner)
        self._target = (self._source + 1) % len(self._ports)
        await self._setslot(self._target, "IMPORTING", self._ids[self._source])
        await self._setslot(self._source, "MIGRATING", self._ids[self._target])

    async def transfer(self, *keys: str) -> None:
        """Move keys that are there already."""
        await self._clients[self._source].migrate(
            "127.0.0.1", self._ports[self._target], list(keys), 0, 1000
        )

    async def end(self) -> None:
        """Clients get MOVED from now on."""
        for index in (self._target, self._source, 3 - self._target - self._source):
            await self._setslot(index, "NODE", self._ids[self._target])
        for client in self._clients:
            await client.aclose()

    async def _setslot(self, index: int, state: str, node_id: str) -> None:
        await self._clients[index].execute_command("CLUSTER SETSLOT", self.slot, state, node_id)  # type: ignore[no-untyped-call]


async def test_scripts_run_where_their_keys_are(redis: Any, tmp_path: Path) -> None:
    """Every node is taught a script that it does not know, once."""
    (tmp_path / "count.lua").write_text(COUNT)
    pipelines = Pipelines(redis)
    scripts = Scripts(pipelines, tmp_path)
    keys = [f"n:{{{index}}}" for index in range(32)]
    assert [await scripts.call("count", keys=[key], args=[2]) for key in keys] == [2] * 32
    sizes = (await redis.dbsize(target_nodes=node) for node in redis.get_primaries())
    assert all([size > 0 async for size in sizes])
    await redis.script_flush()
    assert [await scripts.call("count", keys=[key], args=[3]) for key in keys] == [5] * 32
    await pipelines.aclose()


async def test_a_moved_slot_is_followed(redis: Any, redis_cluster: RedisCluster) -> None:
    """By commands and transactions, while it moves (ASK) and afterwards (MOVED)."""
    move = Move(redis_cluster, "{moving}")
    await redis.set("{moving}a", "1")
    await move.begin()
    assert await redis.set("{moving}b", "2")
    assert await redis.get("{moving}a") == b"1"
    await move.transfer("{moving}a")
    assert await redis.get("{moving}a") == b"1"
    await move.end()
    async with redis.pipeline(transaction=True) as transaction:
        transaction.get("{moving}a").get("{moving}b")
        assert await transaction.execute() == [b"1", b"2"]
    assert await redis.get("{moving}b") == b"2"


async def test_a_pipeline_reports_that_a_slot_moved(
    redis: Any, redis_cluster: RedisCluster
) -> None:
    """Nothing was executed; after `moved` the key maps to its new owner, another server."""
    pipelines = Pipelines(redis)
    before = await pipelines.of("{pipe}")
    assert await before.execute([("SET", "{pipe}n", 1)]) == [b"OK"]
    move = Move(redis_cluster, "{pipe}")
    await move.begin()
    await move.transfer("{pipe}n")
    await move.end()
    (reply,) = await before.execute([("INCR", "{pipe}n")])
    assert isinstance(reply, exceptions.MovedError)
    await pipelines.moved(reply)
    after = await pipelines.of("{pipe}")
    assert await after.run_id() != await before.run_id()
    assert await after.execute([("INCR", "{pipe}n")]) == [2]
    await pipelines.aclose()


async def test_callers_wait_for_a_free_connection(redis: Any) -> None:
    """With more callers than connections to a node, none gets an error."""

    async def both() -> None:
        await redis.incr("n")
        async with redis.pipeline(transaction=False) as pipe:
            await pipe.incr("n").execute()

    await asyncio.gather(*(both() for _ in range(100)))
    assert await redis.get("n") == b"200"


@pytest.fixture
def replicated_cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    """A cluster of the test's own, whose first node has a replica."""
    cluster = RedisCluster(tmp_path, masters=3, replicas=1)
    cluster.start()
    yield cluster
    cluster.stop()


async def test_a_replica_takes_over(replicated_cluster: RedisCluster) -> None:
    """Clients and pipelines of a dead master find its replica; until then the store is away."""
    key = "{3}"
    assert key_slot(key.encode()) < 5462, "a slot of the first node"
    async with store.connect(replicated_cluster.url) as redis:
        confirmed, pipelines = Pipelines(redis, replicas=1), Pipelines(redis)
        assert await (await confirmed.of(key)).execute([("SET", key, 1)]) == [b"OK"]
        assert await _get(pipelines, key) == b"1"
        replicated_cluster.nodes[0].kill()
        with pytest.raises(ServiceError) as caught, store.store_errors("get"):
            await redis.get(key)
        assert caught.value.reason is Reason.STORE_UNAVAILABLE
        assert await _when_back(lambda: _get(pipelines, key)) == b"1"
        assert await _when_back(lambda: redis.get(key)) == b"1"
        await pipelines.aclose()
        await confirmed.aclose()


async def _get(pipelines: Pipelines, key: str) -> Any:
    (reply,) = await (await pipelines.of(key)).execute([("GET", key)])
    if isinstance(reply, Exception):
        raise reply
    return reply


async def _when_back(call: Callable[[], Awaitable[Any]]) -> Any:
    while True:
        try:
            with store.store_errors("call"):
                return await call()
        except ServiceError as error:
            assert error.reason is Reason.STORE_UNAVAILABLE
            await asyncio.sleep(0.05)
