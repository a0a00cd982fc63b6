"""Redis as services use it: scripts by name, failures mapped, no hidden retries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from services.chassis.config.settings import FileSecret
from services.chassis.errors import DependencyUnavailable, Reason, ServiceError
from services.chassis.redis import connect as store
from services.chassis.redis.pipeline import Pipelines
from services.chassis.redis.scripts import Scripts
from tests.lib.redis_server import RedisServer

COUNT = "return redis.call('INCRBY', KEYS[1], ARGV[1])"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two scripts."""
    path = tmp_path / "lua"
    path.mkdir()
    (path / "count.lua").write_text(COUNT)
    (path / "fail.lua").write_text("return redis.error_reply('WRONG on purpose')")
    return path


@asynccontextmanager
async def scripts_of(redis: Redis, folder: Path) -> AsyncIterator[Scripts]:
    """The scripts of `folder` on a dedicated connection."""
    pipelines = Pipelines(redis)
    try:
        yield Scripts(pipelines, folder)
    finally:
        await pipelines.aclose()


async def test_scripts_run_by_name_and_survive_a_restart(
    redis_server: RedisServer, folder: Path
) -> None:
    """A server that has forgotten its scripts is taught again, once, without a second effect."""
    async with store.connect(redis_server.url) as redis, scripts_of(redis, folder) as scripts:
        assert await scripts.call("count", keys=["n"], args=[2]) == 2
        await redis.script_flush()
        assert await scripts.call("count", keys=["n"], args=[3]) == 5
        with pytest.raises(ResponseError, match="on purpose"):
            await scripts.call("fail", keys=["n"])


async def test_a_dead_store_is_unavailable(redis_server: RedisServer, folder: Path) -> None:
    """Callers may retry: UNAVAILABLE / STORE_UNAVAILABLE; after the restart it works again."""
    async with store.connect(redis_server.url) as redis, scripts_of(redis, folder) as scripts:
        await scripts.call("count", keys=["n"], args=[1])
        redis_server.kill()
        with pytest.raises(ServiceError) as refused:
            await scripts.call("count", keys=["n"], args=[1])
        assert refused.value.reason is Reason.STORE_UNAVAILABLE
        redis_server.start(appendfsync="always")
        await store.require(redis)
        await scripts.call("count", keys=["n"], args=[1])


async def test_a_full_store_pushes_back(redis_server: RedisServer, folder: Path) -> None:
    """Out of memory is RESOURCE_EXHAUSTED with a time to retry, not an internal error."""
    async with store.connect(redis_server.url) as redis, scripts_of(redis, folder) as scripts:
        await redis.config_set("maxmemory", "1")
        with pytest.raises(ServiceError) as refused:
            await scripts.call("count", keys=["n"], args=[1])
    assert refused.value.reason is Reason.STORE_FULL
    assert refused.value.retry_after is not None


async def test_a_store_that_never_comes_ends_the_start() -> None:
    """`require` gives up with what exits 69 and names redis."""
    async with store.connect("redis://127.0.0.1:1/0") as redis:
        with pytest.raises(DependencyUnavailable, match=r"^redis: no answer within 0 s"):
            await store.require(redis, seconds=0)


async def test_the_session_server_answers_bytes(redis_url: str) -> None:
    """The shared fixture is a real server, and replies are not decoded."""
    async with store.connect(redis_url) as redis:
        await redis.set("chassis", "1")
        assert await redis.getdel("chassis") == b"1"


def test_an_empty_folder_is_a_mistake(tmp_path: Path) -> None:
    """A wrong path must not become scripts that are missing later."""
    with pytest.raises(ValueError, match="holds no"):
        Scripts(Pipelines(store.connect("redis://127.0.0.1:1/0")), tmp_path)


@pytest.mark.parametrize("follows", [True, False])
async def test_a_rotated_password_counts_at_the_next_connect(
    redis_server: RedisServer, tmp_path: Path, follows: bool
) -> None:
    """The file's, without a restart; a text as URL (negative control) keeps the old one."""

    def url_with(password: str) -> str:
        return redis_server.url.replace("//", f"//worker:{password}@", 1)

    file = tmp_path / "redis_url"
    file.write_text(url_with("first"))
    url = FileSecret(file).get_secret_value
    async with store.connect(redis_server.url) as admin:
        await admin.acl_setuser(
            "worker", True, passwords=["+first"], keys=["*"], categories=["+@all"]
        )
        async with store.connect(url if follows else url()) as redis:
            assert await redis.ping()
            await admin.acl_setuser("worker", True, passwords=["+second", "-first"])
            file.write_text(url_with("second"))
            await admin.client_kill_filter(_type="normal", skipme=True, user="worker")
            await asyncio.sleep(1.1)  # files are looked at once a second
            if follows:
                await _answers(redis)
                return
            with pytest.raises(RedisError, match="invalid username-password"):
                await _answers(redis)


async def _answers(redis: Redis) -> None:
    """Ping on a new connection; the broken one is noticed by the first command."""
    with suppress(RedisConnectionError):
        await redis.ping()
    assert await redis.ping()


async def test_scripts_run_as_the_user_of_a_url_in_a_file(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """At each connect with the present password, as the other commands of the client do."""
    file = tmp_path / "redis_url"

    async def rotate(redis: Redis, password: str) -> None:
        user = await redis.acl_setuser(
            "worker", True, passwords=[f"+{password}"], categories=["+@all"], reset=True
        )
        assert user
        file.write_text(redis_server.url.replace("//", f"//worker:{password}@", 1))

    async with store.connect(redis_server.url) as admin:
        await rotate(admin, "first")
        async with store.connect(FileSecret(file).get_secret_value) as redis:
            pipelines = Pipelines(redis)
            assert await _user_of(pipelines) == b"worker"
            await rotate(admin, "second")
            await admin.client_kill_filter(_type="normal", skipme=True)
            await asyncio.sleep(1.1)  # files are looked at once a second
            with suppress(RedisError):
                await _user_of(pipelines)
            assert await _user_of(pipelines) == b"worker"
            await pipelines.aclose()


async def _user_of(pipelines: Pipelines) -> bytes:
    (user,) = await (await pipelines.of("key")).execute([("ACL", "WHOAMI")])
    if isinstance(user, Exception):
        raise user
    assert isinstance(user, bytes)
    return user
