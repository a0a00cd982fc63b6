"""Pipelines: a batch and its replies, whatever happens to the connection in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import hiredis
import pytest
from redis import exceptions

from services.chassis.redis.connect import connect
from services.chassis.redis.pipeline import Pipeline, Pipelines
from tests.lib.redis_server import RedisServer


@pytest.fixture
async def pipeline(redis_server: RedisServer) -> AsyncIterator[Pipeline]:
    """The pipeline to a server of the test's own."""
    async with connect(redis_server.url) as redis:
        pipelines = Pipelines(redis)
        yield await pipelines.of("key")
        await pipelines.aclose()


async def test_replies_keep_the_order_of_the_commands(pipeline: Pipeline) -> None:
    """An error stands in its place and spares the others."""
    commands = [("SET", "n", 1), ("LPUSH", "n", "x"), ("INCRBY", "n", 2), ("GET", "n")]
    stored, refused, counted, read = await pipeline.execute(commands)
    assert (stored, counted, read) == (b"OK", 3, b"3")
    assert isinstance(refused, exceptions.ResponseError)
    assert await pipeline.execute([]) == []


async def test_a_dead_server_leaves_an_error_in_each_place(
    pipeline: Pipeline, redis_server: RedisServer
) -> None:
    """Nothing raises, nothing hangs; after the restart the next batch goes through."""
    await pipeline.execute([("SET", "n", 1)])
    redis_server.kill()
    for _ in range(2):
        replies = await pipeline.execute([("GET", "n"), ("GET", "n")])
        assert all(isinstance(reply, exceptions.ConnectionError) for reply in replies)
    redis_server.start()
    assert await pipeline.execute([("PING",)]) == [b"PONG"]


async def test_commands_for_one_start_do_not_reach_the_next(
    pipeline: Pipeline, redis_server: RedisServer
) -> None:
    """A batch made for a run_id is not sent to a server that has another one by now."""
    before = await pipeline.run_id()
    redis_server.restart()
    (reply,) = await pipeline.execute([("SET", "n", "stale")], before)
    assert isinstance(reply, exceptions.ConnectionError)
    after = await pipeline.run_id()
    assert after != before
    assert await pipeline.execute([("GET", "n")], after) == [None]


async def test_a_cancelled_batch_leaves_no_reply_behind(
    pipeline: Pipeline, redis_server: RedisServer
) -> None:
    """The replies that were under way are not taken for those of the next batch."""
    waiting = asyncio.create_task(pipeline.execute([("BLPOP", "nothing", 0), ("GET", "n")]))
    async with connect(redis_server.url) as redis:
        while "blpop" not in {client["cmd"] for client in await redis.client_list()}:
            await asyncio.sleep(0.001)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await pipeline.execute([("ECHO", "a"), ("ECHO", "b")]) == [b"a", b"b"]


async def test_a_stray_reply_closes_the_connection(pipeline: Pipeline) -> None:
    """It is not taken for the reply to the next command."""
    assert await pipeline.execute([("ECHO", "a")]) == [b"a"]
    replies = pipeline._replies
    assert replies is not None
    replies.transport.write(hiredis.pack_command(("ECHO", "stray")))  # type: ignore[arg-type]  # typed as one word
    while replies.usable:
        await asyncio.sleep(0.001)
    assert await pipeline.execute([("ECHO", "b"), ("ECHO", "c")]) == [b"b", b"c"]
    assert pipeline._replies is not None
    assert pipeline._replies.usable


async def test_a_closed_pipeline_stays_closed(pipeline: Pipeline) -> None:
    """A late call does not open a connection."""
    await pipeline.aclose()
    (reply,) = await pipeline.execute([("PING",)])
    assert isinstance(reply, exceptions.ConnectionError)
