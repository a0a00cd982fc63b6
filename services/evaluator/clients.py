"""The processes that the evaluator calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio
from seamflow.errors import decode
from seamflow.inspect.clients import RunClients
from seamflow.inspect.endpoints import Endpoints
from seamflow.pages import pages
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb

from services.chassis.rpc.clients import credentials
from services.evaluator.config import EvaluatorConfig

_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that a node offers."""

    node_id: str
    address: str
    can_train: bool
    """Whether its node trains too, and may take it away."""


class Clients(RunClients):
    """The services, which start in any order; workers are at the addresses that nodes name."""

    def __init__(self, config: EvaluatorConfig) -> None:
        services = {name: getattr(config, name) for name in ("scheduler", "weights")}
        super().__init__(
            Endpoints(
                run_id=config.run_id,
                services={"trajectory_manager": config.trajectory_manager, **services},
                credentials=credentials(config),
                connect_timeout=None,
            )
        )
        self.config = config

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


@asynccontextmanager
async def connected(config: EvaluatorConfig) -> AsyncIterator[Clients]:
    """Channels to the services; they connect when first used."""
    clients = Clients(config)
    try:
        yield clients
    finally:
        await clients.endpoints.close()
