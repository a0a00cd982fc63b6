"""Every process that a call needs, from the HTTP gateway to an engine that samples at once."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
from seamflow import Client
from seamflow.channel import connect
from seamflow.client import Rollout
from seamflow.trajectory.v1 import trajectory_pb2

from bench.baselines.store.seamflow_run import RUN_ID, create_run
from bench.baselines.store.workload import Options
from bench.harness import processes
from bench.harness.byte_model import make_byte_model
from bench.harness.processes import Server
from bench.harness.redis_process import FAST, free_port, redis_server

_VOCABULARY = 27
"""The characters from "!" to ";": none may begin a marker, so the text of no token is held back."""
_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
_MAX_RUNNING = 2048
_ROLLOUTS_AT_ONCE = 32


@dataclass(slots=True)
class World:
    """The processes that are measured, and clients of them."""

    engine: Server
    gateway: Server
    http_gateway: Server
    url: str
    """The HTTP gateway."""
    client: Client
    """Of the rollout gateway."""
    http: aiohttp.ClientSession
    folder: Path

    async def rollouts(self, number: int) -> list[Rollout]:
        """So many new ones."""
        limit = asyncio.Semaphore(_ROLLOUTS_AT_ONCE)

        async def start() -> Rollout:
            async with limit:
                return await self.client.start_rollout()

        return await asyncio.gather(*(start() for _ in range(number)))


def cpu_seconds(server: Server) -> float:
    """CPU time that its process has used; the kernel counts in hundredths of a second."""
    times = psutil.Process(server.pid).cpu_times()
    return float(times.user + times.system)


@asynccontextmanager
async def world(folder: Path, step_seconds: float, stream_interval: int) -> AsyncIterator[World]:
    """All of it, in front of an engine that takes `step_seconds` for a token.

    Each message of the engine has `stream_interval` tokens, and every reply is sent as it comes.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    async with AsyncExitStack() as stack:
        redis_url = stack.enter_context(redis_server(FAST))
        manager = processes.manager(folder, redis_url, durability="fast")
        stack.enter_context(manager)
        engine = processes.service(
            "rollout.server",
            "rollout_server",
            folder,
            engine="fake",
            run_id=RUN_ID,
            max_running=_MAX_RUNNING,
            stream_interval=stream_interval,
            fake_step_seconds=step_seconds,
            fake_mean_tokens=0,
            fake_vocab_size=_VOCABULARY,
        )
        stack.enter_context(engine)
        gateway = processes.service(
            "rollout.gateway",
            "rollout_gateway",
            folder,
            run_id=RUN_ID,
            model=make_byte_model(folder / "model", _TEMPLATE),
            response_format="text",
            trajectory_manager=manager.address,
            servers=engine.address,
        )
        stack.enter_context(gateway)
        async with connect(manager.address) as channel:
            options = Options(trajectories=100_000, seed=0, writers=1, batch=1, redis=redis_url)
            await create_run(channel, options, trajectory_pb2.DURABILITY_FAST)
        http_port = free_port()
        http_gateway = processes.service(
            "rollout.http_gateway",
            "http_gateway",
            folder,
            run_id=RUN_ID,
            rollout_gateway=gateway.address,
            http_port=http_port,
            hold_seconds=0,
        )
        stack.enter_context(http_gateway)
        client = await stack.enter_async_context(Client(gateway.address, run_id=RUN_ID))
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        http = await stack.enter_async_context(session)
        url = f"http://127.0.0.1:{http_port}"
        yield World(engine, gateway, http_gateway, url, client, http, folder)
