"""Durability `replicated`: what was acknowledged survives the loss of the master."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from services.chassis.errors import ConfigError, DependencyUnavailable, Reason, ServiceError
from services.lib.token_bytes import unpack_ids
from tests.lib.redis_cluster import RedisCluster
from tests.lib.redis_sentinel import RedisSentinel
from tests.lib.redis_server import RedisServer
from tests.lib.trajectory_manager.support import RULES, Run, tokens
from trajectory_manager.model.records import Durability
from trajectory_manager.store.redis import connect
from trajectory_manager.store.redis.connect import Store, redis_store

GUARDED = {
    "appendfsync": "always",
    "min-replicas-to-write": "2",
    "min-replicas-max-lag": "2",
}

_UNREPLICATED = 4


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[RedisSentinel]:
    """Servers that reject writes without both replicas, and their Sentinels."""
    group = RedisSentinel(tmp_path / "guarded", GUARDED)
    group.start()
    yield group
    group.stop()


@pytest.fixture
def unguarded(tmp_path: Path) -> Iterator[RedisSentinel]:
    """Servers and Sentinels with default settings."""
    group = RedisSentinel(tmp_path)
    group.start()
    yield group
    group.stop()


async def test_a_store_that_resets_connections_at_its_start_is_waited_for(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its PING and the reading of its settings; for ever it is not."""
    resets = [2]

    async def reset(*_: object) -> None:
        if resets[0] > 0:
            resets[0] -= 1
            raise RedisConnectionError("Connection reset by peer")

    monkeypatch.setattr(connect, "_check_settings", reset)
    async with redis_store(redis_url, Durability.FAST, 10.0):
        assert resets == [0]
    resets[0] = 1 << 30
    with pytest.raises(DependencyUnavailable):
        async with redis_store(redis_url, Durability.FAST, 0.1):
            pass


class Writer:
    """Appends one token after the other to a turn, through every failure, and notes the acks."""

    def __init__(self, store: Store, run_id: str = "run") -> None:
        self._run = Run(store, run_id)
        self.acknowledged = 0
        self.refused = 0
        self._epoch = 0

    async def open(self) -> None:
        """Start a run and a rollout."""
        await self._run.store.runs.create_run(self._run.run_id, RULES)
        await self._run.start("r")
        await self._begin()

    async def append(self) -> bool:
        """One more token; False if it was not acknowledged."""
        added = tokens([self.acknowledged])
        try:
            if not self._epoch:
                await self._begin()
            await self._run.append("r", "t", self._epoch, self.acknowledged, added)
        except ServiceError as error:
            assert error.reason in (Reason.STORE_UNAVAILABLE, Reason.STALE_EPOCH)
            self._epoch = 0
            self.refused += 1
            return False
        self.acknowledged += 1
        return True

    async def append_many(self, count: int) -> None:
        """Until `count` more are acknowledged."""
        wanted = self.acknowledged + count
        while self.acknowledged < wanted:
            if not await self.append():
                await asyncio.sleep(0.02)

    async def stored(self) -> list[int]:
        """What the store has of the turn."""
        (turn,) = await self._run.store.tokens.tokens(self._run.run_id, "r", ["t"])
        return list(unpack_ids(turn.ids))

    async def _begin(self) -> None:
        self._epoch = (await self._run.begin("r", "t", [1])).epoch


async def lose_the_master(group: RedisSentinel, writer: Writer) -> RedisServer:
    """Kill it under load, with writes that no replica has; the killed one."""
    await writer.open()
    await writer.append_many(50)
    replicas = await asyncio.to_thread(group.cut_replicas)
    for _ in range(_UNREPLICATED):
        await writer.append()
    old = group.master()
    old.kill()
    for replica in replicas:
        replica.thaw()
    await asyncio.to_thread(group.wait_for_master_other_than, old)
    return old


async def test_a_failover_loses_nothing_that_was_acknowledged(guarded: RedisSentinel) -> None:
    """Without all replicas nothing is acknowledged; with the lost server back, writes continue."""
    async with redis_store(guarded.url, Durability.REPLICATED, 5.0, replicas=2) as store:
        writer = Writer(store)
        old = await lose_the_master(guarded, writer)
        assert writer.acknowledged == 50
        assert writer.refused == _UNREPLICATED
        old.settings["replicaof"] = f"127.0.0.1 {guarded.master().port}"
        await asyncio.to_thread(old.start)
        await writer.append_many(50)
        assert await writer.stored() == list(range(100))


async def test_control_a_failover_in_fast_loses_what_was_acknowledged(
    unguarded: RedisSentinel,
) -> None:
    """The same, with acknowledgements that do not ask the replicas: their tokens are gone."""
    async with redis_store(unguarded.url, Durability.FAST, 5.0) as store:
        writer = Writer(store)
        await lose_the_master(unguarded, writer)
        assert writer.acknowledged == 50 + _UNREPLICATED
        while (stored := await _stored_once_back(writer)) is None:
            await asyncio.sleep(0.02)
        assert stored == list(range(50))


async def test_an_isolated_master_rejects_writes(guarded: RedisSentinel) -> None:
    """At first it cannot confirm, and soon it does not even accept."""
    async with redis_store(guarded.url, Durability.REPLICATED, 15.0, replicas=2) as store:
        writer = Writer(store, "isolated")
        await writer.open()
        await writer.append_many(5)
        master = guarded.master()
        guarded.kill_sentinels()
        for server in guarded.servers:
            if server.runs and server is not master:
                server.freeze()
        assert not await writer.append()
        async with Redis(port=master.port) as client:
            with pytest.raises(ResponseError, match=r"^NOREPLICAS"):
                while await client.set("anything", 1):
                    await asyncio.sleep(0.02)
        assert not await writer.append()
        assert writer.acknowledged == 5


async def test_settings_that_would_lose_tokens_are_rejected(redis_server: RedisServer) -> None:
    """The error names the setting and the cure; a replica that is missing is waited for."""
    for wanted in (Durability.DURABLE, Durability.REPLICATED):
        with pytest.raises(ConfigError, match=r"appendfsync everysec.*appendfsync always"):
            await _open(redis_server.url, wanted)
    async with Redis(port=redis_server.port) as client:
        await client.config_set("appendfsync", "always")
        with pytest.raises(ConfigError, match=r"min-replicas-to-write 0.*set them to 1 and 2"):
            await _open(redis_server.url, Durability.REPLICATED)
        await client.config_set("min-replicas-to-write", 1)
        with pytest.raises(DependencyUnavailable, match=r"a master has not 1 replica\(s\)"):
            await _open(redis_server.url, Durability.REPLICATED)
        await client.config_set("maxmemory", 1 << 30, "maxmemory-policy", "allkeys-lru")
        with pytest.raises(ConfigError, match=r"allkeys-lru.*noeviction"):
            await _open(redis_server.url, Durability.FAST)


@pytest.mark.parametrize("renamed", [True, False])
async def test_a_managed_redis_without_config_serves_fast(tmp_path: Path, renamed: bool) -> None:
    """Its eviction is read from INFO. What no other command tells is required by its name."""
    (tmp_path / "own.conf").write_text("rename-command CONFIG hidden\n" if renamed else "")
    server = RedisServer(tmp_path, {"include": str(tmp_path / "own.conf")})
    server.start(appendfsync="always")
    try:
        url = server.url
        async with Redis(port=server.port) as client:
            if not renamed:
                await client.acl_setuser(
                    "managed", enabled=True, passwords=["+word"], keys=["*"], channels=["*"],
                    categories=["+@all"], commands=["-config"],
                )  # fmt: skip
                url = url.replace("redis://", "redis://managed:word@")
            await _open(url, Durability.FAST)
            for durability in (Durability.DURABLE, Durability.REPLICATED):
                with pytest.raises(ConfigError, match=r"does not allow CONFIG GET .*config\|get"):
                    await _open(url, durability)
            untyped: Any = client
            for name, value in (("maxmemory", 1 << 30), ("maxmemory-policy", "allkeys-lru")):
                command = "hidden" if renamed else "CONFIG"
                await untyped.execute_command(command, "SET", name, value)
        with pytest.raises(ConfigError, match=r"allkeys-lru.*noeviction"):
            await _open(url, Durability.FAST)
    finally:
        server.stop()


async def test_a_setting_that_is_weakened_while_it_runs_stops_the_store(
    redis_server: RedisServer,
) -> None:
    """No write is acknowledged until it is set back; the error names the setting."""
    async with Redis(port=redis_server.port) as client:
        await client.config_set("appendfsync", "always", "no-appendfsync-on-rewrite", "yes")
        with pytest.raises(ConfigError, match="no-appendfsync-on-rewrite yes"):
            await _open(redis_server.url, Durability.DURABLE)
        await client.config_set("no-appendfsync-on-rewrite", "no")
        opened = redis_store(redis_server.url, Durability.DURABLE, 5.0, check_seconds=0.01)
        async with opened as store:
            await store.runs.create_run("run", RULES)
            for name, weak, strong in (
                ("no-appendfsync-on-rewrite", "yes", "no"),
                ("appendfsync", "everysec", "always"),
            ):
                await client.config_set(name, weak)
                await _until(lambda: store.ready(), False)
                with pytest.raises(ServiceError, match=name) as caught:
                    await store.runs.submit("run", [], 1)
                assert caught.value.reason is Reason.STORE_UNAVAILABLE
                await client.config_set(name, strong)
                await _until(lambda: store.ready(), True)
                await store.runs.submit("run", [], 1)


async def test_without_the_check_a_weakened_store_still_acknowledges(
    redis_server: RedisServer,
) -> None:
    """Negative control."""
    async with Redis(port=redis_server.port) as client:
        await client.config_set("appendfsync", "always")
        opened = redis_store(redis_server.url, Durability.DURABLE, 5.0, check_seconds=3600.0)
        async with opened as store:
            await store.runs.create_run("run", RULES)
            await client.config_set("appendfsync", "everysec")
            assert await store.ready()
            await store.runs.submit("run", [], 1)


async def _until(ready: Callable[[], Awaitable[bool]], wanted: bool) -> None:
    async with asyncio.timeout(30):
        while await ready() is not wanted:
            await asyncio.sleep(0.01)


async def test_a_topology_that_could_promote_a_stale_replica_is_rejected(
    guarded: RedisSentinel,
) -> None:
    """A replica that need not confirm could take over, and under `durable` none of them does."""
    with pytest.raises(ConfigError, match="set replicas to 2"):
        await _open(guarded.url, Durability.REPLICATED)
    with pytest.raises(ConfigError, match="set durability to replicated"):
        await _open(guarded.url, Durability.DURABLE)


async def test_every_master_of_a_cluster_is_checked(redis_cluster: RedisCluster) -> None:
    """One server with weaker settings is enough for an error."""
    await _open(redis_cluster.url, Durability.FAST)
    odd = Redis(port=redis_cluster.nodes[2].port)
    async with odd:
        await odd.config_set("maxmemory", 1 << 30, "maxmemory-policy", "volatile-lru")
        with pytest.raises(ConfigError, match="volatile-lru"):
            await _open(redis_cluster.url, Durability.FAST)
        await odd.config_set("maxmemory", 0, "maxmemory-policy", "noeviction")


async def test_a_wrong_password_is_a_mistake_on_every_topology(
    redis_server: RedisServer, redis_cluster: RedisCluster
) -> None:
    """Waiting would not cure it."""
    for url in (redis_server.url, redis_cluster.url):
        with pytest.raises(ConfigError, match="redis_url: "):
            await _open(url.replace("://", "://nobody:wrong@"), Durability.FAST)


async def _open(url: str, durability: Durability) -> None:
    async with redis_store(url, durability, 0.3):
        pass


async def _stored_once_back(writer: Writer) -> list[int] | None:
    try:
        return await writer.stored()
    except ServiceError as error:
        assert error.reason is Reason.STORE_UNAVAILABLE
        return None
