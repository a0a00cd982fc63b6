"""What every call carries: token and deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from seamflow import channel
from seamflow.credentials import Credentials


class Telling(grpc.GenericRpcHandler):
    """Answers what a call came with: its token, and the seconds it has left."""

    def service(self, handler_call_details: Any) -> Any:
        """Unary, or streamed by the method's name."""
        if handler_call_details.method == "/test/Streamed":
            return grpc.unary_stream_rpc_method_handler(self._streamed)
        return grpc.unary_unary_rpc_method_handler(self._unary)

    async def _unary(self, request: bytes, context: Any) -> bytes:
        token = dict(context.invocation_metadata()).get("authorization", "none")
        return f"{token} {context.time_remaining():.0f}".encode()

    async def _streamed(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield await self._unary(request, context)


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """A server that reports its calls."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Telling(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def seen(call: Any, streamed: bool) -> tuple[str, float]:
    """The token and the seconds left that the server saw."""
    answer = await (call.read() if streamed else call)
    token, _, seconds = answer.decode().rpartition(" ")
    return token, float(seconds)


@pytest.mark.parametrize("streamed", [False, True], ids=["unary", "streamed"])
async def test_calls_carry_the_token_and_a_deadline(address: str, streamed: bool) -> None:
    """The caller's deadline where it set one, else one that bounds a forgotten call."""
    async with channel.connect(address, Credentials(token="secret")) as connected:
        make = connected.unary_stream if streamed else connected.unary_unary
        method: (
            grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
            | grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        ) = make("/test/Streamed" if streamed else "/test/Unary")
        token, seconds = await seen(method(b""), streamed)
        assert token == "Bearer secret"
        default = channel.STREAM_TIMEOUT if streamed else channel.UNARY_TIMEOUT
        assert 0.9 * default < seconds < 1.1 * default  # sent in coarse units
        _, seconds = await seen(method(b"", timeout=600.0), streamed)
        assert 0.9 * 600 < seconds < 1.1 * 600


async def test_without_a_token_none_is_sent(address: str) -> None:
    """Negative control."""
    async with channel.connect(address) as connected:
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        method = connected.unary_unary("/test/Unary")
        assert (await seen(method(b""), False))[0] == "none"


@asynccontextmanager
async def slow_link(address: str, delay: float) -> AsyncIterator[str]:
    """An address that leads to `address`; bytes take `delay` seconds each way."""

    writers: list[asyncio.StreamWriter] = []
    tasks: list[asyncio.Task[None]] = []

    async def passed(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            asyncio.get_running_loop().call_later(delay, sink.write, data)

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await asyncio.sleep(2 * delay)  # the round trip of TCP's handshake, which loopback has not
        far_reader, far_writer = await asyncio.open_connection(*address.split(":"))
        writers.append(far_writer)
        tasks.append(asyncio.create_task(passed(reader, far_writer)))
        tasks.append(asyncio.create_task(passed(far_reader, writer)))

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await asyncio.sleep(3 * delay)  # connections on their way
    for writer in writers:
        writer.close()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("connects", [True, False])
async def test_a_link_with_a_long_round_trip_connects(
    address: str, connects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """800 ms there and back; negative control: the shortest wait between tries that was set once,
    which gRPC also takes as the time that a connection may take.
    """
    if not connects:
        options = {**dict(channel._OPTIONS), "grpc.min_reconnect_backoff_ms": 100}
        monkeypatch.setattr(channel, "_OPTIONS", [*options.items()])
    async with slow_link(address, 0.4) as link, channel.connect(link) as connected:
        ready = asyncio.create_task(connected.channel_ready())
        done, _ = await asyncio.wait([ready], timeout=30 if connects else 3)
        ready.cancel()
    assert bool(done) is connects
