"""With replicas asked for, a reply means that one of them has what the master did."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from services.chassis.errors import Reason, ServiceError
from services.chassis.redis.connect import connect, store_errors
from services.chassis.redis.pipeline import Pipelines
from services.chassis.redis.replication import Confirmation, NotReplicated
from tests.lib.redis_server import RedisServer

ONCE = ("EVAL", "return redis.call('SET', KEYS[1], ARGV[1], 'NX') or 'done'", 1, "sf:{r}:n", 1)
"""Idempotent, as all our scripts: a retry finds its effect done and writes nothing."""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[RedisServer, RedisServer]]:
    """A master and its replica."""
    master = RedisServer(tmp_path / "master", {"repl-diskless-sync-delay": "0"})
    master.start()
    replica = RedisServer(tmp_path / "replica", {"replicaof": f"127.0.0.1 {master.port}"})
    replica.start()
    yield master, replica
    replica.stop()
    master.stop()


@pytest.fixture
async def redis(pair: tuple[RedisServer, RedisServer]) -> AsyncIterator[Redis]:
    """A client of the master, once the replica follows."""
    async with connect(pair[0].url) as client:
        await client.set("started", 1)
        while not await client.wait(1, 100):
            await asyncio.sleep(0.01)
        yield client


async def test_unreplicated_writes_are_not_acknowledged(
    pair: tuple[RedisServer, RedisServer], redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the retry that finds it done, though WAIT alone would confirm that one at once."""
    monkeypatch.setattr("services.chassis.redis.replication._WAIT_MS", 50)
    first, second = Pipelines(redis, replicas=1), Pipelines(redis, replicas=1)
    assert await (await first.of("r")).execute([("SET", "sf:{r}:m", 1)]) == [b"OK"]
    pair[1].freeze()
    replies = await (await first.of("r")).execute([ONCE, ("GET",)])
    assert isinstance(replies[0], NotReplicated)
    assert "wrong number of arguments" in str(replies[1]), "an error needs no replica"
    async with Redis(port=pair[0].port, single_connection_client=True) as control:
        assert await control.execute_command(*ONCE) == b"done"  # type: ignore[no-untyped-call]
        assert await control.wait(1, 50) == 1, "WAIT counts from this connection's last write"
    (retried,) = await (await second.of("r")).execute([ONCE])
    assert isinstance(retried, NotReplicated)
    unconfirmed = pytest.raises(ServiceError, match="not confirmed by a replica")
    with unconfirmed as caught, store_errors("append"):
        raise retried
    assert caught.value.reason is Reason.STORE_UNAVAILABLE
    pair[1].thaw()
    while isinstance(retried, NotReplicated):
        (retried,) = await (await second.of("r")).execute([ONCE])
    assert retried == b"done"
    await first.aclose()
    await second.aclose()


@pytest.mark.parametrize("key", ["sf:{run:a/1}:header", "sf:{run}:leases", "sf:runs", b"plain"])
def test_the_marker_is_in_the_slot_and_under_the_prefix_of_the_key(key: str | bytes) -> None:
    """So it reaches the same node of a cluster, and a user that may write the key may write it."""
    (_, marker, *_), _ = Confirmation(1).commands(("GET", key))
    name = key.encode() if isinstance(key, str) else key
    assert key_slot(marker.encode()) == key_slot(name)
    assert marker.partition(":")[0] == name.decode().partition(":")[0]
