"""Clients of a run's services."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import grpc.aio
from seamflow.inspect.clients import RunClients
from seamflow.inspect.endpoints import SERVICES, Endpoints
from seamflow.inspect.processes import Process, look
from seamflow.inspect.snapshot import Snapshot, gather
from seamflow.pages import pages
from seamflow.ranker.v1 import ranker_service_pb2 as ranker_pb
from seamflow.ranker.v1.ranker_service_pb2_grpc import RankerServiceStub
from seamflow.retry import retrying
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.stubs import async_stub
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb

from services.chassis.rpc.clients import credentials
from services.launcher.config import LauncherConfig
from services.launcher.layout import Layout

T = TypeVar("T")
_TIMEOUT = 2.0


class Services(RunClients):
    """The services of a run, which start in any order."""

    def __init__(self, config: LauncherConfig, layout: Layout) -> None:
        written = layout.folder / "addresses.json"
        named = {name: each.key for name, each in SERVICES.items() if each.key in layout.ports}
        super().__init__(
            Endpoints(
                run_id=layout.run_id,
                services={name: layout.address(key) for name, key in named.items()},
                credentials=credentials(config),
                connect_timeout=None,
                folder=layout.folder,
                agents=config.kind_of_agents,
                started=written.stat().st_mtime if written.is_file() else None,
            )
        )
        nodes = [node for node in config.node_plans() if "rollout" in node.tags]
        self.rollout_nodes = frozenset(node.node_id for node in nodes)
        self._ranker = layout.address("ranker") if "ranker" in layout.ports else None

    async def snapshot(self, processes: Sequence[Process] | None = None) -> Snapshot:
        """What trainer, trajectory manager, scheduler and rollout servers report now.

        With `processes` of the run also what these wait for, and what the other services report.
        """
        return await gather(
            self.endpoints, progress_only=True, seconds=_TIMEOUT, processes=processes
        )

    async def nodes(self) -> list[scheduler_pb.Node]:
        """Those of the run, however long the scheduler takes to answer."""
        request = scheduler_pb.ListNodesRequest(run_id=self.run_id)

        async def listed(page: scheduler_pb.ListNodesRequest) -> scheduler_pb.ListNodesResponse:
            return await retrying(lambda: self.scheduler.ListNodes(page))

        return [node async for page in pages(listed, request) for node in page.nodes]

    async def look(self, processes: Sequence[Process]) -> Snapshot:
        """What the processes wait for, and nothing of the run."""
        return Snapshot(processes=await look(processes, self.endpoints, _TIMEOUT))

    async def trainer_status(self) -> trainer_pb.GetStatusResponse | None:
        """State of the trainer; None: it does not answer."""
        request = trainer_pb.GetStatusRequest()
        return await _answer(self.trainer.GetStatus(request, timeout=_TIMEOUT))

    async def ranker_status(self) -> ranker_pb.GetRankerResponse | None:
        """Statistics of the ranker; None: there is none, or it does not answer."""
        if self._ranker is None:
            return None
        stub = async_stub(RankerServiceStub, self.endpoints.channel(self._ranker))
        request = ranker_pb.GetRankerRequest(run_id=self.run_id)
        return await _answer(stub.GetRanker(request, timeout=_TIMEOUT))


@asynccontextmanager
async def connected(config: LauncherConfig, layout: Layout) -> AsyncIterator[Services]:
    """Channels to all services of a run; they connect when first used."""
    services = Services(config, layout)
    try:
        yield services
    finally:
        await services.endpoints.close()


async def _answer(call: Awaitable[T]) -> T | None:
    try:
        return await call
    except grpc.aio.AioRpcError:
        return None
