"""The calls that `make bench-gateway` measures: they notice a reply that is incomplete."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from bench.http_gateway.calls import NUM_TOKENS, post

EVENTS = ['data: {"role"}', *['data: {"token"}'] * NUM_TOKENS, 'data: {"end"}', "data: [DONE]"]


@asynccontextmanager
async def answering(**response: object) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """A client, and the URL of a server with this answer."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(**response)  # type: ignore[arg-type]

    app = web.Application()
    app.add_routes([web.post("/", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as http:
        yield http, f"http://127.0.0.1:{runner.addresses[0][1]}/"
    await runner.cleanup()


async def test_a_complete_reply_is_timed() -> None:
    """Streamed and not streamed."""
    async with answering(text="\n\n".join(EVENTS) + "\n\n") as (http, url):
        assert await post(http, url, {}, True) > 0
    async with answering(text=f'{{"usage": {{"completion_tokens": {NUM_TOKENS}}}}}') as (http, url):
        assert await post(http, url, {}, False) > 0


@pytest.mark.parametrize("missing", [1, -1])
async def test_a_missing_event_is_noticed(missing: int) -> None:
    """A chunk, or the end."""
    events = EVENTS.copy()
    del events[missing]
    async with answering(text="\n\n".join(events) + "\n\n") as (http, url):
        with pytest.raises(RuntimeError, match="events of a reply"):
            await post(http, url, {}, True)


async def test_missing_tokens_and_an_error_are_noticed() -> None:
    """Of a reply that is not streamed."""
    async with answering(text='{"usage": {"completion_tokens": 1}}') as (http, url):
        with pytest.raises(RuntimeError, match="tokens of a reply"):
            await post(http, url, {}, False)
    async with answering(text="{}", status=503) as (http, url):
        with pytest.raises(RuntimeError, match="status of a reply"):
            await post(http, url, {}, False)
