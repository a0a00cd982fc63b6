"""Pipelines connect and authenticate to every kind of server that a URL can name."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvloop
from redis import exceptions

from services.chassis.redis.connect import connect
from services.chassis.redis.pipeline import Pipelines
from tests.lib.redis_server import RedisServer

WHO = (("CLIENT", "GETNAME"), ("CLIENT", "INFO"), ("CONFIG", "GET", "maxmemory-policy"))


async def replies_at(url: str, *commands: tuple[Any, ...]) -> list[Any]:
    """The replies of a new pipeline to the server at `url`."""
    async with connect(url) as redis:
        pipelines = Pipelines(redis)
        try:
            return await (await pipelines.of("key")).execute(commands)
        finally:
            await pipelines.aclose()


@asynccontextmanager
async def tls_in_front_of(port: int, authority: trustme.CA) -> AsyncIterator[int]:
    """The port of a TLS proxy with a certificate of `authority`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", port)
        forward = asyncio.create_task(pump(reader, to_server))
        await pump(from_server, writer)
        await forward

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward bytes until the end."""
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def test_password_name_database_and_resp3(redis_server: RedisServer) -> None:
    """All are set before the first command; maps arrive as dicts."""
    url = f"redis://127.0.0.1:{redis_server.port}/3?client_name=pipeline"
    (done,) = await replies_at(url, ("CONFIG", "SET", "requirepass", "secret"))
    assert done == b"OK"
    name, info, policy = await replies_at(url.replace("//", "//:secret@"), *WHO)
    assert name == b"pipeline"
    assert b" db=3 " in info
    assert policy == {b"maxmemory-policy": b"noeviction"}


async def test_a_wrong_password_fails_the_batch(redis_server: RedisServer) -> None:
    """The pipeline never sends commands on a connection without its credentials."""
    url = f"redis://127.0.0.1:{redis_server.port}/0"
    await replies_at(url, ("CONFIG", "SET", "requirepass", "secret"))
    for refused in (url, url.replace("//", "//:wrong@")):
        (reply,) = await replies_at(refused, ("GET", "key"))
        assert isinstance(reply, exceptions.AuthenticationError)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_unix_socket(tmp_path: Path, run: Callable[[Any], Any]) -> None:
    """A URL without host and port."""
    path = tmp_path / "redis.sock"
    server = RedisServer(tmp_path / "data", settings={"unixsocket": str(path)})
    server.start()
    try:
        assert run(replies_at(f"unix://{path}", ("PING",))) == [b"PONG"]
    finally:
        server.stop()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_tls_trusts_the_named_authority_only(
    redis_server: RedisServer, tmp_path: Path, run: Callable[[Any], Any]
) -> None:
    """A server whose certificate another authority signed gets no command."""
    own, foreign = trustme.CA(), trustme.CA()
    for name, authority in (("own", own), ("foreign", foreign)):
        authority.cert_pem.write_to_path(str(tmp_path / f"{name}.pem"))

    async def replies_by(name: str) -> list[Any]:
        async with tls_in_front_of(redis_server.port, own) as port:
            url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={tmp_path}/{name}.pem"
            return await replies_at(url, ("PING",))

    assert run(replies_by("own")) == [b"PONG"]
    (reply,) = run(replies_by("foreign"))
    assert isinstance(reply, exceptions.ConnectionError)
    assert "certificate" in str(reply).lower()
