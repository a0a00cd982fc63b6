"""A reply is held back, then sent as it comes and kept alive."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

import pytest
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.test_utils import make_mocked_request

from rollout.http_gateway import limits
from rollout.http_gateway.config import HttpGatewayConfig
from rollout.http_gateway.turn_routes import HeldReply

LONG = 3600.0


class Written(AbstractStreamWriter):
    """What a client gets."""

    def __init__(self) -> None:
        self.body = b""
        self.num_heads = 0
        self.has_ended = False

    async def write_headers(self, status_line: str, headers: Any) -> None:
        """The head of the reply."""
        self.num_heads += 1

    async def write(self, chunk: Any) -> None:
        """A part of its body."""
        self.body += bytes(chunk)

    async def write_eof(self, chunk: bytes = b"") -> None:
        """Its end."""
        self.has_ended = True

    async def drain(self) -> None:
        """Nothing waits here."""

    def enable_compression(self, *_: Any, **__: Any) -> None:
        """Not used."""

    def enable_chunking(self) -> None:
        """Not seen."""


def held(writer: Written, hold: float) -> HeldReply:
    """A reply that begins with "<" and shows life by "."."""
    config = HttpGatewayConfig(run_id="run", hold_seconds=hold)
    request = make_mocked_request("POST", "/", writer=writer, transport=mock.Mock())
    return HeldReply(request, config, {"a": "1"}, start=b"<", keep_alive=lambda: b".")


async def until(writer: Written, text: bytes) -> None:
    """Wait until the client has this; the test's timeout bounds it."""
    while text not in writer.body:
        await asyncio.sleep(0.001)


async def test_a_short_reply_is_sent_whole() -> None:
    """Nothing before its end; then with the headers of the end."""
    writer = Written()
    async with held(writer, LONG) as reply:
        await reply.write(b"a")
        assert (reply.has_begun, writer.body) == (False, b"")
        response = await reply.end(b">", {"b": "2"})
    assert isinstance(response, web.Response)
    assert response.body == b"<a>"
    assert (response.headers["a"], response.headers["b"]) == ("1", "2")
    assert (writer.num_heads, writer.has_ended) == (1, True)


async def test_without_holding_each_part_is_sent_at_once() -> None:
    """What begins the reply comes once; nothing is sent for no data."""
    writer = Written()
    async with held(writer, 0.0) as reply:
        await reply.write(b"")
        assert not reply.has_begun
        await reply.write(b"a")
        assert (reply.has_begun, writer.body) == (True, b"<a")
        await reply.write(b"b")
        await reply.end(b">", {"b": "2"})
    assert (writer.body, writer.num_heads, writer.has_ended) == (b"<ab>", 1, True)


async def test_what_was_held_back_is_sent_when_the_time_is_over() -> None:
    """Though nothing follows it."""
    writer = Written()
    async with held(writer, 0.01) as reply:
        await reply.write(b"a")
        await until(writer, b"<a")
        assert reply.has_begun
        await reply.end(b">")
    assert writer.body == b"<a>"


async def test_a_silent_reply_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life after the beginning; it begins with the first one, for it had nothing."""
    monkeypatch.setattr(limits, "KEEP_ALIVE_SECONDS", 0.001)
    writer = Written()
    async with held(writer, 0.001) as reply:
        await until(writer, b"<..")
        await reply.end(b">")
    assert writer.body.startswith(b"<..")
    assert writer.body.endswith(b".>")


async def test_a_cut_reply_closes_the_connection() -> None:
    """The client sees that it is incomplete."""
    writer = Written()
    async with held(writer, 0.0) as reply:
        await reply.write(b"a")
        reply.cut()
        reply._request.transport.abort.assert_called_once_with()  # type: ignore[union-attr]
    assert not writer.has_ended


async def test_nothing_is_sent_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task that keeps it alive is over."""
    monkeypatch.setattr(limits, "KEEP_ALIVE_SECONDS", 0.001)
    writer = Written()
    async with held(writer, 0.0) as reply:
        await reply.write(b"a")
        await reply.end(b">")
    sent = writer.body
    for _ in range(5):
        await asyncio.sleep(0.002)
    assert writer.body == sent
