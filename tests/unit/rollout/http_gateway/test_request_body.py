"""The body of a request is JSON, bounded in size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from unittest import mock

import pytest
from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.streams import StreamReader
from aiohttp.test_utils import make_mocked_request

from bench.harness.constants import changed
from rollout.http_gateway.api_error import ApiError
from rollout.http_gateway.config import HttpGatewayConfig
from rollout.http_gateway.request_body import read_body

LIMIT = 1024
JSON = "application/json"
NONE: Mapping[str, str] = {}


def sent(*parts: bytes, ends: bool = True, headers: Mapping[str, str] = NONE) -> web.Request:
    """A request whose body arrived in `parts`."""
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    protocol.connection_made(mock.Mock(spec=asyncio.Transport))
    body = StreamReader(protocol, 2**16, loop=loop)
    for part in parts:
        body.feed_data(part)
    if ends:
        body.feed_eof()
    return make_mocked_request("POST", "/", {"content-type": JSON, **headers}, payload=body)


async def read(request: web.Request) -> bytes:
    """What `read_body` returns with a limit of LIMIT bytes."""
    return await read_body(request, HttpGatewayConfig(run_id="run", max_body_bytes=LIMIT))


@pytest.mark.parametrize(
    "kind", [JSON, "application/json; charset=utf-8", "Application/JSON", "application/x+json"]
)
async def test_json_is_read_whole(kind: str) -> None:
    """In however many parts, up to the limit."""
    assert await read(sent(b"{", b"}", headers={"content-type": kind})) == b"{}"
    assert len(await read(sent(b"x" * LIMIT))) == LIMIT


@pytest.mark.parametrize(
    ("headers", "shown"),
    [
        ({"content-type": "text/plain"}, "'text/plain'"),
        ({"content-type": ""}, "''"),
        ({"content-type": "x" * 1000}, f"'{'x' * 100}'"),
        ({"content-encoding": "gzip"}, "Content-Encoding"),
    ],
)
async def test_another_kind_is_refused(headers: dict[str, str], shown: str) -> None:
    """Status 415; a long name is cut."""
    with pytest.raises(ApiError) as refused:
        await read(sent(b"{}", headers=headers))
    assert refused.value.status == 415
    assert shown in refused.value.message


@pytest.mark.parametrize("length", [{}, {"content-length": str(LIMIT + 1)}])
async def test_a_body_that_is_too_large_is_refused(length: dict[str, str]) -> None:
    """Status 413, by what it announces or by what arrives; the setting is named."""
    parts = () if length else (b"x" * LIMIT, b"x")
    with pytest.raises(ApiError) as refused:
        await read(sent(*parts, ends=False, headers=length))
    assert refused.value.status == 413
    assert f"{LIMIT} bytes (max_body_bytes)" in refused.value.message


async def test_a_body_that_never_ends_is_refused() -> None:
    """Status 408, which clients repeat; the limit is named."""
    with (
        changed("rollout.http_gateway.limits", {"body_timeout_seconds": 0.01}),
        pytest.raises(ApiError) as refused,
    ):
        await read(sent(b"{", ends=False))
    assert (refused.value.status, refused.value.should_retry) == (408, True)
    assert "0.01 s (body_timeout_seconds)" in refused.value.message
