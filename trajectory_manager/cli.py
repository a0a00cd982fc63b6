"""`python -m trajectory_manager`: build the service and serve it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import NoReturn

from seamflow.trajectory.v1.column_service_pb2_grpc import add_ColumnServiceServicer_to_server
from seamflow.trajectory.v1.run_service_pb2_grpc import add_RunServiceServicer_to_server
from seamflow.trajectory.v1.sample_service_pb2_grpc import add_SampleServiceServicer_to_server
from seamflow.trajectory.v1.task_service_pb2_grpc import add_TaskServiceServicer_to_server
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import (
    add_TrajectoryServiceServicer_to_server,
)

from services.chassis.errors import Reason
from services.chassis.rpc.request_budget import RequestBudget
from services.chassis.rpc.server import Service, run
from trajectory_manager import limits
from trajectory_manager.api.column_servicer import ColumnServicer
from trajectory_manager.api.run_servicer import RunServicer
from trajectory_manager.api.sample_servicer import SampleServicer
from trajectory_manager.api.task_servicer import TaskServicer
from trajectory_manager.api.trajectory_servicer import TrajectoryServicer
from trajectory_manager.config import TrajectoryManagerConfig
from trajectory_manager.model.records import Durability
from trajectory_manager.service.long_poll import LongPoll
from trajectory_manager.service.rollouts import Rollouts
from trajectory_manager.service.sweeper import Sweeper
from trajectory_manager.store.redis.connect import Store, redis_store


def main() -> NoReturn:
    run("trajectory_manager", TrajectoryManagerConfig, build)


@asynccontextmanager
async def build(config: TrajectoryManagerConfig) -> AsyncIterator[Service]:
    """The service on the store that `config` names."""
    required = Durability[config.durability.upper()]
    url = config.redis_url.get_secret_value  # as it is at each connect
    opened = redis_store(
        url,
        required,
        limits.START_SECONDS,
        replicas=config.replicas,
        check_seconds=limits.DURABILITY_CHECK_SECONDS,
    )
    async with opened as store:
        yield service(config, store)


def service(config: TrajectoryManagerConfig, store: Store) -> Service:
    """The five gRPC services and the sweeper on `store`; any number of them may share it."""
    rollouts = Rollouts(store, keeps_rows=config.max_indexed_rollouts > 0)
    sweeps = Sweeper(
        store,
        rollouts,
        limits.UNLEASED_ROLLOUT_SECONDS,
        max_indexed=config.max_indexed_rollouts,
    )
    waiting = LongPoll(store.runs)

    draining = asyncio.Event()

    async def sweeper() -> None:
        # Ends at the drain, uncancelled: redis-py may swallow a cancellation that meets a reply.
        while not draining.is_set():
            await sweeps.sweep()
            with suppress(TimeoutError):
                await asyncio.wait_for(draining.wait(), limits.SWEEP_SECONDS)

    async def drain() -> None:
        draining.set()
        waiting.drain()

    inflight = store_budget(limits.MAX_INFLIGHT_BYTES)
    trajectories = TrajectoryServicer(
        store,
        rollouts,
        inflight,
        config.max_turn_tokens,
        keeps_rows=config.max_indexed_rollouts > 0,
    )
    tasks = TaskServicer(store, rollouts, waiting, config.max_queued_tasks)
    return Service(
        servicers=[
            (add_RunServiceServicer_to_server, RunServicer(store)),
            (add_TrajectoryServiceServicer_to_server, trajectories),
            (add_TaskServiceServicer_to_server, tasks),
            (add_SampleServiceServicer_to_server, SampleServicer(store, waiting)),
            (add_ColumnServiceServicer_to_server, ColumnServicer(store, waiting)),
        ],
        background=[sweeper],
        ready=store.ready,
        drain=drain,
    )


_RETRY_SECONDS = 0.2


def store_budget(max_inflight_bytes: int) -> RequestBudget:
    """Refuses with STORE_FULL what would exceed `max_inflight_bytes`: the store is slow."""
    return RequestBudget(max_inflight_bytes, full=Reason.STORE_FULL, retry_seconds=_RETRY_SECONDS)
