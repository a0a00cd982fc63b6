"""Clients of a run's services."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import grpc.aio
from seamflow.evaluator.v1.evaluator_service_pb2_grpc import EvaluatorServiceStub
from seamflow.inspect.snapshot import ServerSnapshot, Snapshot
from seamflow.pages import pages
from seamflow.ranker.v1 import ranker_service_pb2 as ranker_pb
from seamflow.ranker.v1.ranker_service_pb2_grpc import RankerServiceStub
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceStub
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from seamflow.stubs import async_stub
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub
from seamflow.trajectory.v1.sample_service_pb2_grpc import SampleServiceStub
from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceStub
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub

from services.chassis.rpc import clients
from services.launcher.config import LauncherConfig
from services.launcher.layout import Layout

if TYPE_CHECKING:
    from seamflow.evaluator.v1.evaluator_service_pb2_grpc import EvaluatorServiceAsyncStub
    from seamflow.ranker.v1.ranker_service_pb2_grpc import RankerServiceAsyncStub
    from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceAsyncStub
    from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceAsyncStub
    from seamflow.trainer.v1.trainer_service_pb2_grpc import TrainerServiceAsyncStub
    from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceAsyncStub
    from seamflow.trajectory.v1.sample_service_pb2_grpc import SampleServiceAsyncStub
    from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceAsyncStub
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub
    from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceAsyncStub

T = TypeVar("T")
_TIMEOUT = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Stubs of all services that the launcher calls."""

    run_id: str
    runs: RunServiceAsyncStub
    trajectories: TrajectoryServiceAsyncStub
    samples: SampleServiceAsyncStub
    tasks: TaskServiceAsyncStub
    scheduler: SchedulerServiceAsyncStub
    trainer: TrainerServiceAsyncStub
    weights: WeightServiceAsyncStub
    evaluator: EvaluatorServiceAsyncStub
    servers: dict[str, RolloutServerServiceAsyncStub] = field(default_factory=dict)
    """Rollout servers by id: that of the node, and a number where it has several."""
    addresses: dict[str, str] = field(default_factory=dict)
    """host:port of each."""
    ranker: RankerServiceAsyncStub | None = None

    async def snapshot(self) -> Snapshot:
        """Query all services concurrently."""
        async with asyncio.TaskGroup() as group:
            readiness = group.create_task(self._readiness())
            nodes = group.create_task(self._nodes())
            trainer = group.create_task(self.trainer_status())
            servers = {name: group.create_task(self.server_info(name)) for name in self.servers}
        return Snapshot(
            now=time.time(),
            run_id=self.run_id,
            readiness=readiness.result(),
            nodes=nodes.result(),
            trainer=trainer.result(),
            servers=tuple(
                ServerSnapshot(
                    node_id=_node_of(name), address=self.addresses[name], info=info.result()
                )
                for name, info in servers.items()
            ),
        )

    @property
    def rollout_nodes(self) -> frozenset[str]:
        """The nodes that have a rollout server."""
        return frozenset(map(_node_of, self.servers))

    async def trainer_status(self) -> trainer_pb.GetStatusResponse | None:
        """State of the trainer; None: it does not answer."""
        request = trainer_pb.GetStatusRequest()
        return await _answer(lambda: self.trainer.GetStatus(request, timeout=_TIMEOUT))

    async def ranker_status(self) -> ranker_pb.GetRankerResponse | None:
        """Statistics of the ranker; None: there is none, or it does not answer."""
        stub, request = self.ranker, ranker_pb.GetRankerRequest(run_id=self.run_id)
        if stub is None:
            return None
        return await _answer(lambda: stub.GetRanker(request, timeout=_TIMEOUT))

    async def _readiness(self) -> sample_pb.Readiness | None:
        request = sample_pb.GetReadinessRequest(run_id=self.run_id)
        answer = await _answer(lambda: self.samples.GetReadiness(request, timeout=_TIMEOUT))
        return answer.readiness if answer is not None else None

    async def _nodes(self) -> tuple[scheduler_pb.Node, ...]:
        request = scheduler_pb.ListNodesRequest(run_id=self.run_id)
        listed = pages(lambda page: self.scheduler.ListNodes(page, timeout=_TIMEOUT), request)
        try:
            return tuple([node async for page in listed for node in page.nodes])
        except grpc.aio.AioRpcError:
            return ()

    async def server_info(self, name: str) -> server_pb.GetServerInfoResponse | None:
        """State of a rollout server; None: it does not answer."""
        request, stub = server_pb.GetServerInfoRequest(), self.servers[name]
        return await _answer(lambda: stub.GetServerInfo(request, timeout=_TIMEOUT))


@asynccontextmanager
async def connected(config: LauncherConfig, layout: Layout) -> AsyncIterator[Services]:
    """Channels to all services of a run; they connect when first used."""
    async with AsyncExitStack() as stack:

        async def channel(name: str) -> Any:
            return await stack.enter_async_context(clients.channel(config, layout.address(name)))

        manager = await channel("trajectory_manager")
        named = {
            name.partition("/")[2]: name
            for name in layout.ports
            if name.startswith("rollout_server/")
        }
        servers = {
            node: async_stub(RolloutServerServiceStub, await channel(name))
            for node, name in named.items()
        }
        yield Services(
            run_id=layout.run_id,
            runs=async_stub(RunServiceStub, manager),
            trajectories=async_stub(TrajectoryServiceStub, manager),
            samples=async_stub(SampleServiceStub, manager),
            tasks=async_stub(TaskServiceStub, manager),
            scheduler=async_stub(SchedulerServiceStub, await channel("scheduler")),
            trainer=async_stub(TrainerServiceStub, await channel("trainer")),
            weights=async_stub(WeightServiceStub, await channel("weights")),
            evaluator=async_stub(EvaluatorServiceStub, await channel("evaluator")),
            servers=servers,
            addresses={node: layout.address(name) for node, name in named.items()},
            ranker=(
                async_stub(RankerServiceStub, await channel("ranker"))
                if "ranker" in layout.ports
                else None
            ),
        )


def _node_of(server_id: str) -> str:
    """A node's name has no dot."""
    return server_id.partition(".")[0]


async def _answer(call: Callable[[], Awaitable[T]]) -> T | None:
    try:
        return await call()
    except grpc.aio.AioRpcError:
        return None
