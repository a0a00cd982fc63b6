"""A command whose reply was lost is never sent again, on any topology."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis import exceptions
from redis.asyncio import Redis

from services.chassis.redis.connect import connect
from services.chassis.redis.pipeline import Pipelines
from tests.lib.redis_cluster import RedisCluster
from tests.lib.redis_proxy import ReplyThief
from tests.lib.redis_server import RedisServer, free_port

ADD = ("XADD", "{k}s", "*", "field", "value")


@pytest.fixture(params=["server", "cluster"], scope="module")
def topology(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RedisServer, int, str]]:
    """A server, the port by which its clients know it, and the URL with that port."""
    folder, port = tmp_path_factory.mktemp("once"), free_port()
    if request.param == "server":
        server = RedisServer(folder)
        server.start()
        yield server, port, f"redis://127.0.0.1:{port}/0"
        server.stop()
        return
    cluster = RedisCluster(folder, 1, settings={"cluster-announce-port": str(port)})
    cluster.start()
    yield cluster.nodes[0], port, f"redis+cluster://127.0.0.1:{port}/"
    cluster.stop()


@pytest.fixture
async def stolen_from(
    topology: tuple[RedisServer, int, str],
) -> AsyncIterator[tuple[ReplyThief, str]]:
    """A thief before an empty server, and the URL that leads through it."""
    server, port, url = topology
    async with Redis(port=server.port) as redis:
        await redis.flushall()
    thief = ReplyThief(server.port)
    async with thief.listen(port):
        yield thief, url


async def test_a_lost_reply_is_an_error_and_one_entry(
    stolen_from: tuple[ReplyThief, str],
) -> None:
    """The client gets a ConnectionError, and the entry is stored once."""
    thief, url = stolen_from
    async with connect(url) as redis:
        await redis.ping()
        thief.armed = True
        with pytest.raises(exceptions.ConnectionError):
            await redis.execute_command(*ADD)  # type: ignore[no-untyped-call]
        assert await redis.xlen("{k}s") == 1


async def test_a_pipeline_does_not_repeat_either(stolen_from: tuple[ReplyThief, str]) -> None:
    """Its next batch goes over a new connection; the old batch stays as it was."""
    thief, url = stolen_from
    async with connect(url) as redis:
        pipelines = Pipelines(redis)
        pipeline = await pipelines.of("{k}s")
        await pipeline.run_id()
        thief.armed = True
        (reply,) = await pipeline.execute([ADD])
        assert isinstance(reply, exceptions.ConnectionError)
        assert await pipeline.execute([("XLEN", "{k}s")]) == [1]
        await pipelines.aclose()


async def test_control_redis_py_repeats(tmp_path: Path) -> None:
    """Its own defaults leave two entries behind one call."""
    server = RedisServer(tmp_path)
    server.start()
    thief = ReplyThief(server.port)
    async with thief.listen() as port, Redis(port=port) as redis:
        await redis.ping()
        thief.armed = True
        await redis.execute_command(*ADD)  # type: ignore[no-untyped-call]
        assert await redis.xlen("{k}s") == 2
    server.stop()
