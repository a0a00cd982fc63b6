"""Every store, as one fixture: each test of the store suite runs on all of them."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest

from tests.trajectory_manager.support import RULES, Run
from trajectory_manager.memory_store import memory_store
from trajectory_manager.records import Durability
from trajectory_manager.redis_store import redis_store
from trajectory_manager.store import Store


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
