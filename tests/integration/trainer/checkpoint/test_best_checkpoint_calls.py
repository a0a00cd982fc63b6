"""HoldCheckpoint and KeepCheckpoint: the best checkpoint stays, where the trainer sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from seamflow.trainer.v1 import trainer_service_pb2 as pb

from services.chassis.errors import Reason, ServiceError
from tests.lib.trainer.training import Training
from trainer.checkpoint.checkpoint_files import read_parameters, read_state
from trainer.servicer import TrainerServicer

CONTEXT = cast(Any, None)


async def test_the_best_step_is_kept_while_later_ones_are_deleted(training: Training) -> None:
    """Held after its step, kept after its evaluation; control: a step that was not held is gone."""
    await training.fill(3)
    async with training.service(3, checkpoint__keep=1) as service:
        servicer = cast(TrainerServicer, service.servicers[0][1])
        await service.background[0]()
        assert (await servicer.HoldCheckpoint(pb.HoldCheckpointRequest(step=3), CONTEXT)).held
        assert not (await servicer.HoldCheckpoint(pb.HoldCheckpointRequest(step=1), CONTEXT)).held
        with pytest.raises(ServiceError) as refused:
            await servicer.KeepCheckpoint(pb.KeepCheckpointRequest(step=1), CONTEXT)
        assert refused.value.reason == Reason.NOT_FOUND
        request = pb.KeepCheckpointRequest(
            step=3, weight_version=3, metric="success", mean=0.75, low=0.5, high=1.0
        )
        for _ in range(2):  # idempotent
            kept = Path((await servicer.KeepCheckpoint(request, CONTEXT)).folder)
    assert read_state(kept).step == 3
    assert read_parameters(kept)
    facts = json.loads((kept / "best.json").read_text())
    assert (facts["step"], facts["metric"], facts["value"]) == (3, "success", 0.75)
    assert facts["interval"] == [0.5, 1.0]


@pytest.mark.parametrize(("rpc", "step"), [("HoldCheckpoint", -1), ("KeepCheckpoint", 0)])
async def test_a_step_that_cannot_be_is_named(training: Training, rpc: str, step: int) -> None:
    """With the cure."""
    async with training.service(1) as service:
        servicer = cast(TrainerServicer, service.servicers[0][1])
        with pytest.raises(ServiceError, match="step"):
            await getattr(servicer, rpc)(getattr(pb, f"{rpc}Request")(step=step), CONTEXT)
