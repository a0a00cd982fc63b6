"""A Redis that comes back without its data: nothing is answered from the empty store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import structlog
from redis import Redis

from services.chassis.errors import Reason, ServiceError
from services.chassis.redis import store_mark
from tests.lib.redis_server import RedisServer
from tests.lib.trajectory_manager.support import RULES
from trajectory_manager.model.records import Durability
from trajectory_manager.store.redis import keys
from trajectory_manager.store.redis.connect import Store, redis_store

_IN_MEMORY = {"appendonly": "no", "save": ""}


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that keeps nothing on disk by itself."""
    server = RedisServer(tmp_path / "redis", _IN_MEMORY)
    server.start()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks count from their first second on."""
    monkeypatch.setattr(store_mark, "_SETTLED_SECONDS", 0.0)


async def _broken(store: Store) -> None:
    """The call that finds the connection broken, after which another one is opened."""
    with suppress(ServiceError):
        await store.runs.run("run")


async def test_an_empty_store_answers_nothing_until_its_data_is_back(
    in_memory: RedisServer, tmp_path: Path
) -> None:
    """Callers wait, as while it is down; with the backup in its place they go on."""
    file = tmp_path / "redis" / "dump.rdb"
    async with redis_store(in_memory.url, Durability.FAST, 5.0) as store:
        await store.runs.create_run("run", RULES)
        Redis(port=in_memory.port).save()
        backup = file.rename(tmp_path / "backup.rdb")
        in_memory.restart()
        await _broken(store)
        for call in (store.runs.config, store.runs.run):
            with pytest.raises(ServiceError, match="without its data") as caught:
                await call("run")
            assert caught.value.reason is Reason.STORE_UNAVAILABLE
        assert not await store.ready()
        in_memory.stop()
        backup.rename(file)
        in_memory.start()
        await _broken(store)
        assert await store.runs.config("run") == RULES
        assert await store.ready()


@pytest.mark.parametrize("is_checked", [True, False])
async def test_a_store_that_is_emptied_is_noticed_without_a_new_connection(
    in_memory: RedisServer, is_checked: bool
) -> None:
    """FLUSHALL; control: where nobody looks, a run is said never to have existed."""
    seconds = 0.02 if is_checked else 3600.0
    async with redis_store(in_memory.url, Durability.FAST, 5.0, check_seconds=seconds) as store:
        await store.runs.create_run("run", RULES)
        Redis(port=in_memory.port).flushall()
        while is_checked and await store.ready():
            await asyncio.sleep(0.01)
        with pytest.raises(ServiceError) as caught:
            await store.runs.config("other")
        is_refused = caught.value.reason is Reason.STORE_UNAVAILABLE
        assert is_refused is is_checked is ("without its data" in str(caught.value))


async def test_a_service_that_starts_on_an_empty_store_uses_it(in_memory: RedisServer) -> None:
    """To begin anew it is restarted."""
    for _ in range(2):
        async with redis_store(in_memory.url, Durability.FAST, 5.0) as store:
            assert await store.runs.create_run("run", RULES) is None
        in_memory.restart()


async def test_a_young_mark_may_be_missing(
    in_memory: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that writes each second loses it without having lost much; it is marked again."""
    async with redis_store(in_memory.url, Durability.FAST, 5.0) as store:
        monkeypatch.setattr(store_mark, "_SETTLED_SECONDS", 3600.0)
        for _ in range(2):
            await store.runs.create_run("run", RULES)
            in_memory.restart()
            await _broken(store)
            with pytest.raises(ServiceError, match="does not exist"):
                await store.runs.run("run")
        monkeypatch.setattr(store_mark, "_SETTLED_SECONDS", 0.0)
        in_memory.restart()
        await _broken(store)
        with pytest.raises(ServiceError, match="without its data"):
            await store.runs.run("run")


async def test_without_the_mark_an_empty_store_says_that_runs_do_not_exist(
    in_memory: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(keys, "STORE", "")
    async with redis_store(in_memory.url, Durability.FAST, 5.0) as store:
        await store.runs.create_run("run", RULES)
        in_memory.restart()
        await _broken(store)
        with pytest.raises(ServiceError) as caught:
            await store.runs.run("run")
        assert caught.value.reason is Reason.NOT_FOUND


async def test_a_store_that_keeps_nothing_on_disk_is_warned_of(
    in_memory: RedisServer, redis_server: RedisServer
) -> None:
    """In `fast` it is allowed; one with an append-only file is not warned of."""
    for url, warned in ((in_memory.url, True), (redis_server.url, False)):
        with structlog.testing.capture_logs() as lines:
            async with redis_store(url, Durability.FAST, 5.0):
                pass
        events = [line["event"] for line in lines]
        assert ("store_keeps_nothing_on_disk" in events) is warned
