"""`python -m scheduler`: the scheduler process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from seamflow.scheduler.v1.scheduler_service_pb2_grpc import add_SchedulerServiceServicer_to_server

from scheduler import limits
from scheduler.api.servicer import SchedulerServicer
from scheduler.config import SchedulerConfig
from scheduler.policy.allocation_policy import AllocationPolicy, load_policy
from scheduler.policy.training_nodes import SplitRule
from scheduler.pool.node_leases import NodeLeases
from scheduler.pool.pool import Pool
from scheduler.store.redis_store import RedisStore
from services.chassis.errors import DependencyUnavailable
from services.chassis.redis.connect import connect
from services.chassis.rpc.server import Service, run
from services.chassis.steady_clock import SteadyClock

_SWEEPS_PER_LEASE = 8


def main() -> None:
    run("scheduler", SchedulerConfig, build)


@asynccontextmanager
async def build(config: SchedulerConfig) -> AsyncIterator[Service]:
    store = await _open_store(config)
    try:
        yield await service(config, store)
    finally:
        await store.close()


async def service(config: SchedulerConfig, store: RedisStore) -> Service:
    pool = Pool(
        store=store,
        policy=_policy(config),
        leases=NodeLeases(config.lease_seconds, limits.LEASE_MARGIN_SECONDS, time.monotonic),
        clock=SteadyClock(),
        leave_seconds=limits.LEAVE_SECONDS,
        split_rule=_split_rule(config),
    )
    await pool.open()
    # Often enough that the store confirms this scheduler within the margin.
    pause = min(config.lease_seconds / _SWEEPS_PER_LEASE, limits.LEASE_MARGIN_SECONDS / 2)

    async def sweep_forever() -> None:
        while True:
            await asyncio.sleep(pause)
            await pool.sweep()

    servicer = SchedulerServicer(pool, config.lease_seconds)
    return Service(
        servicers=[(add_SchedulerServiceServicer_to_server, servicer)],
        background=[sweep_forever],
        ready=store.reachable,
        drain=pool.close,
    )


def _policy(config: SchedulerConfig) -> AllocationPolicy:
    return load_policy(
        config.policy,
        lending=config.lending,
        min_dwell_seconds=config.min_dwell_seconds,
        moves_nodes=config.allocation.max_train_nodes > 0,
    )


def _split_rule(config: SchedulerConfig) -> SplitRule | None:
    given = config.allocation
    if not given.max_train_nodes:
        return None
    return SplitRule(
        min_nodes=given.min_train_nodes,
        max_nodes=given.max_train_nodes,
    )


async def _open_store(config: SchedulerConfig) -> RedisStore:
    store = RedisStore(connect(config.redis_url.get_secret_value), limits.MAX_EVENTS)
    if not await store.reachable():
        await store.close()
        cure = "start it, or correct redis_url in [scheduler]"
        raise DependencyUnavailable("redis", f"Redis does not answer; {cure}")
    return store
