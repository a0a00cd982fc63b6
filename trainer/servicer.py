"""TrainerService: translates rpcs into calls of the training loop and the device lease."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc.aio
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb2
from seamflow.trainer.v1 import trainer_service_pb2_grpc as trainer_grpc

from services.chassis.errors import Reason, failed_precondition, invalid_argument, not_found
from trainer.checkpoint.best_checkpoint import BestCheckpoint, BestObject
from trainer.config import TrainerConfig
from trainer.loop import Trainer
from trainer.ranks.device_lease import DeviceLease
from trainer.ranks.rank_group import RankGroup

Context = grpc.aio.ServicerContext[Any, Any]


class TrainerServicer(trainer_grpc.TrainerServiceServicer):
    """The gRPC service of rank 0."""

    def __init__(
        self,
        config: TrainerConfig,
        trainer: Trainer,
        device: DeviceLease,
        ranks: RankGroup,
        best: BestCheckpoint | BestObject,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._device = device
        self._ranks = ranks
        self._best, self._best_lock = best, asyncio.Lock()

    async def GetStatus(  # noqa: N802 -- named by the contract
        self, request: trainer_pb2.GetStatusRequest, context: Context
    ) -> trainer_pb2.GetStatusResponse:
        progress = self._trainer.progress
        return trainer_pb2.GetStatusResponse(
            run_id=self._config.run_id,
            state=self._state(),
            step=progress.step,
            num_steps=self._trainer.progress.last_step,
            weight_version=self._trainer.weight_version,
            world_size=self._ranks.rank0.world_size,
            checkpoint_step=self._trainer.checkpoint_step,
            metrics=progress.record.numbers() if progress.record else {},
            suspended=self._device.is_suspended(request.node_id),
            alarms=self._trainer.alarms.texts,
            rank_nodes=filter(None, self._ranks.rank0.nodes),
            replicas=self._ranks.rank0.replicas,
            max_replicas=self._ranks.rank0.max_replicas,
        )

    async def Suspend(  # noqa: N802 -- named by the contract
        self, request: trainer_pb2.SuspendRequest, context: Context
    ) -> trainer_pb2.SuspendResponse:
        # Shielded from a caller that disconnects: a move must not stop halfway.
        suspended = self._device.suspend(_epoch(request.epoch), request.node_id)
        num_bytes = await asyncio.shield(suspended)
        return trainer_pb2.SuspendResponse(num_bytes=num_bytes)

    async def Resume(  # noqa: N802 -- named by the contract
        self, request: trainer_pb2.ResumeRequest, context: Context
    ) -> trainer_pb2.ResumeResponse:
        await asyncio.shield(self._device.resume(_epoch(request.epoch), request.node_id))
        return trainer_pb2.ResumeResponse()

    async def SaveCheckpoint(  # noqa: N802 -- named by the contract
        self, request: trainer_pb2.SaveCheckpointRequest, context: Context
    ) -> trainer_pb2.SaveCheckpointResponse:
        if self._trainer.progress.step == 0:
            raise failed_precondition(Reason.WRONG_STATE, "no optimizer step is finished yet")
        # Shielded from a caller that disconnects: the nodes must be released afterwards.
        step = await asyncio.shield(self._trainer.save_checkpoint())
        return trainer_pb2.SaveCheckpointResponse(step=step)

    async def FinishTraining(  # noqa: N802 -- named by the contract
        self, request: trainer_pb2.FinishTrainingRequest, context: Context
    ) -> trainer_pb2.FinishTrainingResponse:
        return trainer_pb2.FinishTrainingResponse(num_steps=self._trainer.finish())

    async def SetReplicas(  # noqa: N802 -- named by the contract
        self, request: trainer_pb2.SetReplicasRequest, context: Context
    ) -> trainer_pb2.SetReplicasResponse:
        try:
            self._trainer.replicas.want(request.replicas)
        except ValueError as error:
            raise invalid_argument("replicas", request.replicas, str(error)) from error
        return trainer_pb2.SetReplicasResponse()

    async def TrackEvaluation(  # noqa: N802 -- named by the contract
        self, request: trainer_pb2.TrackEvaluationRequest, context: Context
    ) -> trainer_pb2.TrackEvaluationResponse:
        self._trainer.track_evaluation(request.step, request.numbers)
        return trainer_pb2.TrackEvaluationResponse()

    async def HoldCheckpoint(  # noqa: N802 -- named by the contract
        self, request: trainer_pb2.HoldCheckpointRequest, context: Context
    ) -> trainer_pb2.HoldCheckpointResponse:
        step = _step(request.step, least=0)
        # Shielded from a caller that waits no longer: weights may be out long before.
        held = await asyncio.shield(self._hold(step))
        return trainer_pb2.HoldCheckpointResponse(held=held)

    async def KeepCheckpoint(  # noqa: N802 -- named by the contract
        self, request: trainer_pb2.KeepCheckpointRequest, context: Context
    ) -> trainer_pb2.KeepCheckpointResponse:
        step = _step(request.step, least=1)
        async with self._best_lock:
            await self._trainer.checkpoint_written(step)
            try:
                folder = await asyncio.to_thread(self._best.keep, step, _facts(request))
            except FileNotFoundError as error:
                raise not_found("checkpoint of step", str(step)) from error
        return trainer_pb2.KeepCheckpointResponse(folder=str(folder))

    async def _hold(self, step: int) -> bool:
        async with self._best_lock:
            await self._trainer.checkpoint_written(step)
            return await asyncio.to_thread(self._best.hold, step)

    def _state(self) -> trainer_pb2.TrainerState.ValueType:
        if self._trainer.progress.finished:
            return trainer_pb2.TRAINER_STATE_FINISHED
        if self._device.suspended:
            return trainer_pb2.TRAINER_STATE_SUSPENDED
        if self._trainer.progress.training:
            return trainer_pb2.TRAINER_STATE_TRAINING
        return trainer_pb2.TRAINER_STATE_WAITING


def _epoch(epoch: int) -> int:
    if epoch < 0:
        raise invalid_argument("epoch", epoch, "give the assignment's epoch, 0 or more")
    return epoch


def _step(step: int, least: int) -> int:
    if step < least:
        raise invalid_argument("step", step, f"give an optimizer step, {least} or more")
    return step


def _facts(request: trainer_pb2.KeepCheckpointRequest) -> Mapping[str, object]:
    """What best.json says."""
    has_interval = request.HasField("low") and request.HasField("high")
    return {
        "step": request.step,
        "weight_version": request.weight_version,
        "metric": request.metric,
        "value": request.mean,
        "interval": (request.low, request.high) if has_interval else None,
    }
