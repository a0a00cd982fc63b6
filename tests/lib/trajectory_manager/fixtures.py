"""Every store, as one fixture: each test of the store suite runs on all of them."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import grpc.aio
import pytest

from services.chassis.rpc.server import started
from tests.lib.trajectory_manager.client import Client
from tests.lib.trajectory_manager.memory.store import memory_store
from tests.lib.trajectory_manager.support import RULES, Run
from trajectory_manager.cli import service
from trajectory_manager.config import TrajectoryManagerConfig
from trajectory_manager.model.records import Durability
from trajectory_manager.store.redis.connect import Store, redis_store


@pytest.fixture(params=["memory", "redis", "cluster"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """In memory, on one Redis server and on a Redis Cluster of three nodes."""
    if request.param == "memory":
        yield memory_store()
        return
    if request.param == "redis":
        url = request.getfixturevalue("redis_url")
    else:
        url = request.getfixturevalue("redis_cluster").url
    async with redis_store(url, Durability.FAST, 5.0) as opened:
        yield opened


@pytest.fixture
async def run(store: Store) -> Run:
    """A fresh run with RULES."""
    run_id = uuid.uuid4().hex
    await store.runs.create_run(run_id, RULES)
    return Run(store, run_id)


@pytest.fixture
async def replicas(store: Store) -> AsyncIterator[tuple[Client, Client]]:
    """A client of each of two replicas on one store, for one fresh run."""
    config = TrajectoryManagerConfig(
        redis_url="redis://oracle",
        port=0,
        admin_port=-1,
        max_queued_tasks=8,
        drain_seconds=0.2,
    )
    run_id = uuid.uuid4().hex
    async with AsyncExitStack() as stack:
        clients = []
        for _ in range(2):
            port = await stack.enter_async_context(started(service(config, store), config))
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
            await stack.enter_async_context(channel)
            clients.append(Client(channel, run_id))
        await clients[0].create_run()
        yield clients[0], clients[1]
