"""Floods below the calls of the HTTP gateway, and calls of web pages of another site.

An agent that talks over HTTP goes on beside connections that send nothing, little or half a
request; the gateway closes those that it need not keep. Without limits it keeps them all.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from bench.harness import processes
from bench.harness.processes import Child, Server
from bench.harness.redis_process import free_port
from tests.chaos.edges.abuse import begun
from tests.chaos.edges.canary import compared, memory_growth
from tests.chaos.edges.flooder import CLOSED, FLOODS, KEPT_OPEN
from tests.chaos.edges.world import RUN_ID, world

_SECONDS, _QUICK_SECONDS = 4.0, 1.5
_SECONDS_LIMITED, _SECONDS_UNLIMITED = 1.0, 3600.0
_HOSTS_OFF = '["other.example"]'
_BODY = {"model": "policy", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
_FOREIGN: tuple[Mapping[str, str], ...] = (
    {"Host": "other.example"},
    {"Origin": "http://other.example"},
    {"Host": "other.example", "Origin": "http://other.example"},
)
"""What a browser sends for a page of another site, also of one whose name was made to resolve to
this machine."""


def run(seed: int, *, quick: bool = False) -> dict[str, float]:
    """The figures; nothing of it is random, so `seed` is not used."""
    with tempfile.TemporaryDirectory(prefix="floods-") as folder:
        seconds = _QUICK_SECONDS if quick else _SECONDS
        return asyncio.run(_run(Path(folder), seconds))


async def _run(folder: Path, seconds: float) -> dict[str, float]:
    figures: dict[str, float] = {}
    async with _gateway(folder / "limited", _SECONDS_LIMITED) as gateway:
        for name in FLOODS:
            found = await _under_flood(folder, gateway, name, seconds)
            figures |= {f"floods.{name}.{key}": value for key, value in found.items()}
        leases = await _foreign_leases(gateway)
    async with _gateway(
        folder / "unlimited", _SECONDS_UNLIMITED, allowed_hosts=_HOSTS_OFF
    ) as gateway:
        kept_open = [await _under_flood(folder, gateway, name, seconds) for name in KEPT_OPEN]
        unguarded = await _foreign_leases(gateway)
    shown = [*(not found["closed"] for found in kept_open), unguarded > 0]
    return {
        **figures,
        "floods.kinds_kept": sum(not figures[f"floods.{name}.closed"] for name in KEPT_OPEN),
        "floods.foreign_leases": leases,
        "negative_controls": len(shown),
        "negative_controls_failed": sum(shown),
    }


@asynccontextmanager
async def _gateway(folder: Path, seconds: float, **settings: str) -> AsyncIterator[Server]:
    """An HTTP gateway; its address is where it answers HTTP.

    `seconds`: how long a connection may be idle, and a body may take.
    """
    constants = {
        "services.lib.http.http_server": {"IDLE_CONNECTION_SECONDS": seconds},
        "rollout.http_gateway.limits": {"BODY_TIMEOUT_SECONDS": seconds},
    }
    async with world(folder, {}) as made:
        port = free_port()
        server = processes.service(
            "rollout.http_gateway",
            "http_gateway",
            folder,
            constants,
            run_id=RUN_ID,
            rollout_gateway=made.gateway.address,
            http_port=port,
            **settings,
        )
        with server:
            server.port = port
            server.wait()
            yield server


async def _under_flood(
    folder: Path, gateway: Server, name: str, seconds: float
) -> dict[str, float]:
    numbers, files = count(), Path(tempfile.mkdtemp(dir=folder))

    @asynccontextmanager
    async def flood() -> AsyncIterator[None]:
        file = files / str(next(numbers))
        command = processes.python("tests.chaos.edges.flooder", gateway.address, name, str(file))
        with Child("flooder", command, files, processes.environment()):
            await begun(file)
            yield

    async with _agent(gateway) as turn:
        memory = asyncio.create_task(memory_growth(gateway))
        turns = await compared(turn, flood, seconds)
        memory.cancel()
        growth = await memory
    closed = sum(file.read_text().count(CLOSED) for file in files.iterdir())
    return {"p99_ratio": turns.p99_ratio, "growth_mib": growth / 2**20, "closed": float(closed)}


@asynccontextmanager
async def _agent(gateway: Server) -> AsyncIterator[Any]:
    """A turn of a rollout over HTTP, to be called."""
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        async with session.post(f"http://{gateway.address}/rollouts", json={}) as response:
            rollout = await response.json()
        headers = {"authorization": f"Bearer {rollout['credential']}"}

        async def turn() -> None:
            url = f"{rollout['base_url']}/chat/completions"
            for is_last in (False, False, True):  # as the official SDKs repeat a call
                try:
                    async with session.post(url, json=_BODY, headers=headers) as response:
                        await response.read()
                    return
                except aiohttp.ClientConnectionError:  # an idle connection that was just closed
                    if is_last:
                        raise

        yield turn


async def _foreign_leases(gateway: Server) -> float:
    """Calls of web pages of another site that got a rollout."""
    given = 0
    async with aiohttp.ClientSession() as session:
        for headers in _FOREIGN:
            url = f"http://{gateway.address}/rollouts"
            async with session.post(url, json={}, headers=headers) as response:
                given += response.status == 200
    return float(given)
