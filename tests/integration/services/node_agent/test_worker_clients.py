"""What an activity makes of its worker's answers."""

from __future__ import annotations

from typing import Any

import pytest
from seamflow.channel import connect
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trainer.v1.trainer_service_pb2_grpc import (
    TrainerServiceServicer,
    add_TrainerServiceServicer_to_server,
)

from services.chassis.config.settings import ServerConfig
from services.chassis.rpc.server import Service, started
from services.node_agent.worker_clients import TrainActivity

TRAINING = trainer_pb.TRAINER_STATE_TRAINING
FINISHED = trainer_pb.TRAINER_STATE_FINISHED
SUSPENDED = trainer_pb.TRAINER_STATE_SUSPENDED


class AnsweringTrainer(TrainerServiceServicer):
    """Gives one answer."""

    def __init__(self, answer: trainer_pb.GetStatusResponse) -> None:
        self._answer = answer
        self.asked: list[str] = []

    async def GetStatus(
        self, request: trainer_pb.GetStatusRequest, context: Any
    ) -> trainer_pb.GetStatusResponse:
        """Answer with the status of the calling node."""
        self.asked.append(request.node_id)
        return self._answer


@pytest.mark.parametrize(
    ("state", "suspended", "is_off"),
    [
        (TRAINING, False, False),
        (FINISHED, False, False),
        (FINISHED, True, True),
        (TRAINING, True, True),
        (SUSPENDED, False, True),
    ],
    ids=["training", "finished", "finished and off", "training elsewhere", "older trainer"],
)
async def test_a_trainer_is_off_where_it_holds_no_device(
    state: trainer_pb.TrainerState.ValueType, suspended: bool, is_off: bool
) -> None:
    """Asked about this node, whatever else it does: a finished trainer intrudes no more."""
    answer = trainer_pb.GetStatusResponse(state=state, suspended=suspended)
    trainer = AnsweringTrainer(answer)
    service = Service(servicers=[(add_TrainerServiceServicer_to_server, trainer)])
    async with (
        started(service, ServerConfig(drain_seconds=0.0)) as port,
        connect(f"127.0.0.1:{port}") as channel,
    ):
        assert (await TrainActivity(channel, "a").status()).is_off == is_off
    assert trainer.asked == ["a"]
