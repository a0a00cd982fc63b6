"""A training beside an evaluator: trainer, weights, scheduler and rollout server in one."""

from __future__ import annotations

from typing import Any

import grpc
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.rollout.v1 import rollout_server_service_pb2_grpc as server_grpc
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.scheduler.v1 import scheduler_service_pb2_grpc as scheduler_grpc
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trainer.v1 import trainer_service_pb2_grpc as trainer_grpc
from seamflow.weights.v1 import weight_service_pb2 as weight_pb
from seamflow.weights.v1 import weight_service_pb2_grpc as weight_grpc

from services.chassis.rpc.server import Service


class Training(  # type: ignore[misc]  # TrainerService and RolloutServerService each have a Resume
    trainer_grpc.TrainerServiceServicer,
    weight_grpc.WeightServiceServicer,
    scheduler_grpc.SchedulerServiceServicer,
    server_grpc.RolloutServerServiceServicer,
):
    """One node that rolls out and trains; step N makes version N. A test moves it on."""

    def __init__(self, last_step: int = 100) -> None:
        self.step, self.last_step = 0, last_step
        self.oldest_version = 1
        """Older ones are deleted."""
        self.address = ""
        """host:port of all of it."""
        self.held: list[int] = []
        """Steps whose checkpoint was held, 0 for none."""
        self.kept: list[trainer_pb.KeepCheckpointRequest] = []
        self.tracked: list[int] = []
        """Steps whose evaluation the trackers show."""
        self.num_asked_to_finish = 0

    def service(self) -> Service:
        """All of it, to be served."""
        return Service(
            servicers=[
                (trainer_grpc.add_TrainerServiceServicer_to_server, self),
                (weight_grpc.add_WeightServiceServicer_to_server, self),
                (scheduler_grpc.add_SchedulerServiceServicer_to_server, self),
                (server_grpc.add_RolloutServerServiceServicer_to_server, self),
            ]
        )

    async def GetStatus(self, request: Any, context: Any) -> Any:
        """FINISHED after the last step."""
        is_finished = self.step >= self.last_step
        return trainer_pb.GetStatusResponse(
            run_id="run",
            state=trainer_pb.TRAINER_STATE_FINISHED
            if is_finished
            else trainer_pb.TRAINER_STATE_TRAINING,
            step=self.step,
            num_steps=self.last_step,
            weight_version=self.step,
        )

    async def FinishTraining(self, request: Any, context: Any) -> Any:
        """The step in progress is the last one, and is made at once."""
        self.num_asked_to_finish += 1
        self.last_step = min(self.last_step, self.step + 1)
        self.step = self.last_step
        return trainer_pb.FinishTrainingResponse(num_steps=self.last_step)

    async def TrackEvaluation(self, request: Any, context: Any) -> Any:
        """Noted."""
        self.tracked.append(request.step)
        return trainer_pb.TrackEvaluationResponse()

    async def HoldCheckpoint(self, request: Any, context: Any) -> Any:
        """Every step has a checkpoint."""
        self.held.append(request.step)
        return trainer_pb.HoldCheckpointResponse(held=bool(request.step))

    async def KeepCheckpoint(self, request: Any, context: Any) -> Any:
        """Noted."""
        self.kept.append(request)
        return trainer_pb.KeepCheckpointResponse(folder="/checkpoints/best")

    async def GetManifest(self, request: Any, context: Any) -> Any:
        """The newest version, once there is one, or the one that is asked for."""
        version = request.weight_version if request.HasField("weight_version") else self.step
        if 0 < version < self.oldest_version:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"version {version} is deleted")
        manifest = weight_pb.Manifest(weight_version=version, step=version) if version else None
        return weight_pb.GetManifestResponse(manifest=manifest)

    async def ListNodes(self, request: Any, context: Any) -> Any:
        """The only node, with both of its workers."""
        node = scheduler_pb.Node(node_id="node-a", capability_tags=["rollout", "train"])
        for tag in node.capability_tags:
            node.workers.add(tag=tag, address=self.address)
        return scheduler_pb.ListNodesResponse(nodes=[node])

    async def UpdateWeights(self, request: Any, context: Any) -> Any:
        """Whatever is asked for is loaded."""
        version = request.weight_version if request.HasField("weight_version") else self.step
        return server_pb.UpdateWeightsResponse(weight_version=version)

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        """It has the newest version."""
        return server_pb.GetServerInfoResponse(weight_version=self.step)
