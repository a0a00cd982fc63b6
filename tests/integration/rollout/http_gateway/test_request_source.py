"""Web pages cannot use the HTTP gateway; agents, by whatever client, can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from rollout.http_gateway.config import HttpGatewayConfig
from services.lib.http.http_server import ForeignRequestError, check_source
from tests.lib.rollout.http_gateway.support import World, world

JSON = {"content-type": "application/json"}
LEASE = b'{"wait_seconds": 0}'


async def test_what_web_pages_send_is_refused(tmp_path: Path) -> None:
    """On every route, before anything is read; control: the same without their headers."""
    async with world(tmp_path) as gateway:
        port = gateway.url.rpartition(":")[2]
        for path in ("/rollouts/lease", "/rollouts", "/rollouts/x/finish", "/rollouts/x/extend"):
            for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example"):
                assert await _status(gateway, path, host=host) == 403
            for origin in ("http://evil.example", "null", "", f"https://localhost:{port}"):
                assert await _status(gateway, path, origin=origin) == 403
            assert await _status(gateway, path) != 403
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            assert await _status(gateway, "/rollouts/lease", **{"content-type": kind}) == 415
        async with (
            aiohttp.ClientSession(skip_auto_headers=["Content-Type"]) as http,
            http.post(f"{gateway.url}/rollouts/lease", data=LEASE) as response,
        ):
            assert response.status == 415


async def test_names_of_this_gateway_are_taken(tmp_path: Path) -> None:
    """Addresses, localhost, `public_url` and `allowed_hosts`; `public_url` begins every URL."""
    given: dict[str, Any] = {
        "public_url": "https://p.example/x",
        "allowed_hosts": ("inside.example",),
    }
    async with world(tmp_path, **given) as gateway:
        port = gateway.url.rpartition(":")[2]
        names = (
            "localhost",
            f"127.0.0.1:{port}",
            "[::1]:1",
            "10.1.2.3",
            "P.example",
            "inside.example",
        )
        for name in names:
            headers = {**JSON, "host": name}
            status, answer = await gateway.post("/rollouts", {}, headers=headers)
            assert status == 200
            assert answer["base_url"].startswith("https://p.example/x/rollouts/")
        for origin in ("https://p.example", f"http://127.0.0.1:{port}", "http://inside.example"):
            assert await _status(gateway, "/rollouts/lease", origin=origin) == 200
        assert await _status(gateway, "/rollouts/lease", origin="http://p.example") == 403


async def test_the_sdk_is_unaffected(tmp_path: Path) -> None:
    """It sends no Origin, and the address of its base URL as Host."""
    async with world(tmp_path) as gateway:
        gateway.say("hello")
        async with AsyncOpenAI(
            base_url=gateway.rollout["base_url"], api_key=gateway.rollout["credential"]
        ) as client:
            messages: Any = [{"role": "user", "content": "say"}]
            reply = await client.chat.completions.create(model="policy", messages=messages)
    assert reply.choices[0].message.content == "hello"


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        ({}, True),
        ({"host": "0.0.0.0", "development": True}, True),
        ({"host": "0.0.0.0", "token": "t"}, False),
        ({"host": "0.0.0.0", "token": "t", "allowed_hosts": ("mine.example",)}, True),
    ],
)
def test_names_are_free_only_where_tokens_are(settings: dict[str, Any], is_refused: bool) -> None:
    """In a cluster the name of the service is as good as any."""
    config = HttpGatewayConfig(run_id="run", **settings)
    headers = {"Host": "http-gateway.default.svc:8080"}
    if not is_refused:
        check_source(headers, "http", config, "http_gateway")
        return
    with pytest.raises(ForeignRequestError, match="allowed_hosts"):
        check_source(headers, "http", config, "http_gateway")


async def _status(gateway: World, path: str, **headers: str) -> int:
    given = {**JSON, **headers}
    async with gateway.http.post(f"{gateway.url}{path}", data=LEASE, headers=given) as response:
        return response.status
