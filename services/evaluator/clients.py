"""The processes that the evaluator calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc.aio
from seamflow.errors import decode
from seamflow.pages import pages
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceStub
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from seamflow.stubs import async_stub
from seamflow.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub
from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceStub
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub

from services.chassis.rpc.clients import channel
from services.evaluator.config import EvaluatorConfig

if TYPE_CHECKING:
    from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceAsyncStub
    from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceAsyncStub
    from seamflow.trainer.v1.trainer_service_pb2_grpc import TrainerServiceAsyncStub
    from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceAsyncStub
    from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceAsyncStub
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub
    from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceAsyncStub

_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that a node offers."""

    node_id: str
    address: str
    can_train: bool
    """Whether its node trains too, and may take it away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """Stubs of the services; those of workers are made when they are first called."""

    run_id: str
    config: EvaluatorConfig
    runs: RunServiceAsyncStub
    trajectories: TrajectoryServiceAsyncStub
    tasks: TaskServiceAsyncStub
    weights: WeightServiceAsyncStub
    scheduler: SchedulerServiceAsyncStub
    stack: AsyncExitStack
    """Closes the channels to workers."""
    channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)

    async def workers(self, tag: str) -> Sequence[Worker]:
        """The workers of a tag, those on nodes that never train first.

        Raises:
            SeamflowError: the scheduler does not answer.
        """
        request = scheduler_pb.ListNodesRequest(run_id=self.run_id)
        listed = pages(lambda page: self.scheduler.ListNodes(page, timeout=_SECONDS), request)
        try:
            nodes = [node async for page in listed for node in page.nodes]
        except grpc.aio.AioRpcError as error:
            raise decode(error) from error
        found = [
            Worker(node.node_id, worker.address, "train" in node.capability_tags)
            for node in nodes
            for worker in node.workers
            if worker.tag == tag and worker.run_id in ("", self.run_id)
        ]
        return sorted(found, key=lambda worker: (worker.can_train, worker.node_id))

    async def rollout_server(self, address: str) -> RolloutServerServiceAsyncStub:
        return async_stub(RolloutServerServiceStub, await self._to(address))

    async def trainer(self, address: str) -> TrainerServiceAsyncStub:
        return async_stub(TrainerServiceStub, await self._to(address))

    async def _to(self, address: str) -> grpc.aio.Channel:
        if address not in self.channels:
            opened = channel(self.config, address)
            self.channels[address] = await self.stack.enter_async_context(opened)
        return self.channels[address]


@asynccontextmanager
async def connected(config: EvaluatorConfig) -> AsyncIterator[Clients]:
    """Channels to the services; they connect when first used."""
    async with AsyncExitStack() as stack:

        async def to(address: str) -> grpc.aio.Channel:
            return await stack.enter_async_context(channel(config, address))

        manager = await to(config.trajectory_manager)
        yield Clients(
            run_id=config.run_id,
            config=config,
            runs=async_stub(RunServiceStub, manager),
            trajectories=async_stub(TrajectoryServiceStub, manager),
            tasks=async_stub(TaskServiceStub, manager),
            weights=async_stub(WeightServiceStub, await to(config.weights)),
            scheduler=async_stub(SchedulerServiceStub, await to(config.scheduler)),
            stack=stack,
        )
