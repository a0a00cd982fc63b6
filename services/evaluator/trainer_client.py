"""What the evaluator asks of the trainer; without an answer it goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import grpc.aio
from seamflow.errors import SeamflowError
from seamflow.stubs import async_stub
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub

from services.chassis.log import get_logger
from services.evaluator.clients import Clients
from services.lib.evaluation import EvaluationLine

if TYPE_CHECKING:
    from seamflow.trainer.v1.trainer_service_pb2_grpc import TrainerServiceAsyncStub

_SECONDS = 5.0
_KEEP_SECONDS = 60.0
"""Copies take longer than links, where a file system has none."""

T = TypeVar("T")


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
