"""A console of a run whose trajectory manager is in the test's own process."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc.aio

from services.chassis.rpc.server import started
from services.console.cli import build
from services.console.config import ConsoleConfig
from tests.lib.trajectory_manager.client import Client
from trajectory_manager.cli import service
from trajectory_manager.config import TrajectoryManagerConfig
from trajectory_manager.model.records import Durability
from trajectory_manager.store.redis.connect import redis_store

TOKEN = "a-token-of-the-tests"
NOBODY = "127.0.0.1:1"
"""Where no service listens."""


@dataclass(slots=True)
class World:
    """A run, its manager and a console that shows it."""

    client: Client
    """Plays the run."""
    http: aiohttp.ClientSession
    """Has no cookie."""
    url: str
    """Of the console."""

    async def get(self, path: str, **query: Any) -> Any:
        """JSON of a path below the run; fails unless the status is 200."""
        status, values = await self.ask(path, **query)
        assert status == 200, values
        return values

    async def ask(self, path: str, **query: Any) -> tuple[int, Any]:
        """Status and JSON of a path below the run."""
        url = f"{self.url}/api/runs/{self.client.run_id}/{path}"
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with self.http.get(url, params=query, headers=headers) as response:
            return response.status, await response.json()


@asynccontextmanager
async def world(redis_url: str, **given: Any) -> AsyncIterator[World]:
    """A fresh run on a real Redis; `given`: settings of the console."""
    manager = TrajectoryManagerConfig(redis_url=redis_url, port=0, admin_port=-1, drain_seconds=0.2)
    async with (
        redis_store(redis_url, Durability.FAST, 5.0) as store,
        started(service(manager, store), manager) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        client = Client(channel, uuid.uuid4().hex)
        await client.create_run()
        config = ConsoleConfig(
            access_token=TOKEN,
            run_id=client.run_id,
            trajectory_manager=f"127.0.0.1:{port}",
            drain_seconds=0.2,
            **dict.fromkeys(("rollout_gateway", "scheduler", "trainer", "weights"), NOBODY),
            **given,
        )
        async with build(config) as console, aiohttp.ClientSession() as http:
            yield World(client, http, f"http://127.0.0.1:{console.ports['http_port']}")


async def group(client: Client, name: str, *rewards: float) -> list[str]:
    """Play all rollouts of a task."""
    await client.submit(name)
    return [await client.play(value=value) for value in rewards]
