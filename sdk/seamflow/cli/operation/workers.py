"""Commands to one worker: weights for a rollout server, a trainer's checkpoint and replicas."""

from __future__ import annotations

import argparse

import grpc.aio

from seamflow.cli.arguments.verbs import Verbs
from seamflow.cli.endpoints import Endpoints, reached
from seamflow.errors import UnavailableError, decode
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceStub
from seamflow.stubs import async_stub
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub

_SECONDS = 890.0
"""Both wait for work in progress; below the servers' cap on unary calls."""


def register(verbs: Verbs) -> None:
    """Add `seamflow update-weights`, `save-checkpoint` and `set-replicas`."""
    about = "Let a rollout server load weights now."
    update = verbs.add("update-weights", about, update_weights)
    update.add_argument("server", metavar="HOST:PORT")
    update.add_argument("--version", type=int, help="a committed version; default: the newest")
    verbs.add("save-checkpoint", "Let the trainer write a checkpoint now.", save_checkpoint)
    about = "Set the number of model copies that train, from the trainer's next step on."
    verbs.add("set-replicas", about, set_replicas).add_argument("replicas", type=int)


async def update_weights(given: argparse.Namespace, endpoints: Endpoints) -> int:
    """Let a rollout server load committed weights now; prints the version it then serves."""
    request = server_pb.UpdateWeightsRequest(weight_version=given.version)
    async with endpoints.channel(given.server) as channel:
        stub = async_stub(RolloutServerServiceStub, channel)
        try:
            response = await stub.UpdateWeights(request, timeout=_SECONDS)
        except grpc.aio.AioRpcError as failure:
            error = decode(failure)
            if isinstance(error, UnavailableError) and not error.reason:
                message = f"the rollout server at {given.server} does not answer: {error}"
                raise UnavailableError(message) from failure
            raise error from failure
    print(f"rollout server {given.server} serves v{response.weight_version}")
    return 0


async def save_checkpoint(given: argparse.Namespace, endpoints: Endpoints) -> int:
    """Let the trainer write a checkpoint at its next step boundary; prints the step."""
    async with reached(endpoints, "trainer") as channel:
        stub = async_stub(TrainerServiceStub, channel)
        request = trainer_pb.SaveCheckpointRequest()
        response = await stub.SaveCheckpoint(request, timeout=_SECONDS)
    print(f"checkpoint of step {response.step} is durable")
    return 0


async def set_replicas(given: argparse.Namespace, endpoints: Endpoints) -> int:
    """Set how many data-parallel copies of the models train; prints that they follow."""
    async with reached(endpoints, "trainer") as channel:
        stub = async_stub(TrainerServiceStub, channel)
        await stub.SetReplicas(trainer_pb.SetReplicasRequest(replicas=given.replicas))
    print(f"the next step begins with {given.replicas} replicas")
    return 0
