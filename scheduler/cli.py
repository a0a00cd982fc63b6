"""Wires the scheduler together: `python -m scheduler`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from seamflow.scheduler.v1.scheduler_service_pb2_grpc import add_SchedulerServiceServicer_to_server

from scheduler.config import SchedulerConfig
from scheduler.leases import Leases
from scheduler.memory_store import MemoryStore
from scheduler.policy import AllocationPolicy, load_policy
from scheduler.pool import Pool
from scheduler.redis_store import RedisStore
from scheduler.servicer import SchedulerServicer
from scheduler.store import Store
from services.chassis.errors import DependencyUnavailable
from services.chassis.redis import connect
from services.chassis.server import Service, run

__all__ = ["build", "main"]

_SWEEPS_PER_LEASE = 8


def main() -> None:
    """Serve until a signal."""
    run("scheduler", SchedulerConfig, build)


@asynccontextmanager
async def build(config: SchedulerConfig) -> AsyncIterator[Service]:
    """Open the store and assemble the service."""
    policy = _policy(config)
    store = await _open_store(config)
    try:
        leases = Leases(config.lease_seconds, config.lease_margin_seconds, time.monotonic)
        pool = Pool(
            store=store,
            policy=policy,
            leases=leases,
            clock=time.time,
            leave_seconds=config.leave_seconds,
        )
        await pool.open()

        # Also often enough to be confirmed as the newest within the margin.
        pause = min(config.lease_seconds / _SWEEPS_PER_LEASE, config.lease_margin_seconds / 2)

        async def sweep_forever() -> None:
            while True:
                await asyncio.sleep(pause)
                await pool.sweep()

        servicer = SchedulerServicer(pool, config.lease_seconds)
        yield Service(
            servicers=[(add_SchedulerServiceServicer_to_server, servicer)],
            background=[sweep_forever],
            ready=store.reachable,
            drain=pool.close,
        )
    finally:
        await store.close()


def _policy(config: SchedulerConfig) -> AllocationPolicy:
    return load_policy(
        config.policy, lending=config.lending, min_dwell_seconds=config.min_dwell_seconds
    )


async def _open_store(config: SchedulerConfig) -> Store:
    if config.redis_url is None:
        return MemoryStore(config.max_events)
    store = RedisStore(connect(config.redis_url), config.max_events)
    if not await store.reachable():
        await store.close()
        cure = "start it, or correct redis_url in [scheduler]"
        raise DependencyUnavailable("redis", f"Redis does not answer; {cure}")
    return store
