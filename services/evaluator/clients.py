"""The processes that the evaluator calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import grpc.aio
from seamflow.errors import SeamflowError, decode
from seamflow.inspect.clients import RunClients
from seamflow.inspect.endpoints import Endpoints
from seamflow.pages import pages
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.stubs import async_stub
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub

from services.chassis.log import get_logger
from services.chassis.rpc.clients import credentials
from services.evaluator.config import EvaluatorConfig
from services.lib.evaluation import EvaluationLine

if TYPE_CHECKING:
    from seamflow.trainer.v1.trainer_service_pb2_grpc import TrainerServiceAsyncStub


_SECONDS = 5.0


_KEEP_SECONDS = 60.0
"""Copies take longer than links, where a file system has none."""

T = TypeVar("T")


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


class TrainerClient:
    """The trainer at the configured address, or at the one that its node names."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._address = clients.config.trainer
        self._held = 0

    async def status(self) -> trainer_pb.GetStatusResponse | None:
        """Its state; None: it does not answer."""
        request = trainer_pb.GetStatusRequest()
        for address in await self._addresses():
            trainer = self._at(address)
            try:
                status = await trainer.GetStatus(request, timeout=_SECONDS)
            except grpc.aio.AioRpcError:
                continue  # restarting, or of several nodes' the one without rank 0
            self._address = address
            return status
        return None

    async def finish(self) -> bool:
        """Make the step in progress the last one; whether the trainer has heard it."""
        request = trainer_pb.FinishTrainingRequest()
        return await self._ask(lambda to: to.FinishTraining(request, timeout=_SECONDS)) is not None

    async def track(self, line: EvaluationLine) -> None:
        """Show a result in the trackers; without an answer evaluation.jsonl alone has it."""
        request = trainer_pb.TrackEvaluationRequest(step=line.step, numbers=_numbers(line))
        await self._ask(lambda to: to.TrackEvaluation(request, timeout=_SECONDS))

    async def hold(self, step: int) -> None:
        """Keep the checkpoint of a step for the time of its evaluation; 0: none any more."""
        if not step and not self._held:
            return
        self._held, request = step, trainer_pb.HoldCheckpointRequest(step=step)
        await self._ask(lambda to: to.HoldCheckpoint(request, timeout=_KEEP_SECONDS))

    async def keep(self, line: EvaluationLine) -> str | None:
        """Make the checkpoint of an evaluated step the best one; its folder, None without one."""
        assert line.mean is not None
        low, high = line.interval or (None, None)
        request = trainer_pb.KeepCheckpointRequest(
            step=line.step,
            weight_version=line.weight_version,
            metric=line.metric,
            mean=line.mean,
            low=low,
            high=high,
        )
        kept = await self._ask(lambda to: to.KeepCheckpoint(request, timeout=_KEEP_SECONDS))
        return None if kept is None else kept.folder

    async def _addresses(self) -> Sequence[str]:
        if self._address is not None:
            known, self._address = self._address, self._clients.config.trainer
            return (known,)
        try:
            return [worker.address for worker in await self._clients.workers("train")]
        except SeamflowError:
            return ()

    def _at(self, address: str) -> TrainerServiceAsyncStub:
        return async_stub(TrainerServiceStub, self._clients.endpoints.channel(address))

    async def _ask(self, call: Callable[[TrainerServiceAsyncStub], Awaitable[T]]) -> T | None:
        if self._address is None:
            await self.status()
        if self._address is None:
            return None
        try:
            return await call(self._at(self._address))
        except grpc.aio.AioRpcError as error:
            get_logger().debug("trainer_did_not", code=error.code().name, detail=error.details())
            return None


def _numbers(line: EvaluationLine) -> Mapping[str, float]:
    assert line.mean is not None
    low, high = line.interval or (line.mean, line.mean)
    passes = {f"pass_at_{k}": value for k, value in (line.pass_at or {}).items()}
    return {"mean": line.mean, "low": low, "high": high, **passes}
