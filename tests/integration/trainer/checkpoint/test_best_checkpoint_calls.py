"""HoldCheckpoint and KeepCheckpoint: the best checkpoint stays, where the trainer sees it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from seamflow.trainer.v1 import trainer_service_pb2 as pb

from services.chassis.errors import Reason, ServiceError
from tests.lib.trainer.training import Training
from trainer import fsync_files
from trainer.checkpoint.checkpoint_files import read_parameters, read_state
from trainer.loop import Trainer
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


@pytest.mark.parametrize("waits", [True, False])
async def test_a_checkpoint_that_is_being_written_is_held(
    training: Training, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Its weights are out before it is durable; *control*: who does not wait finds none."""
    go_on, write = threading.Event(), fsync_files.write_tensors

    def slow(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        assert not path.name.startswith("rank_") or go_on.wait(20)
        write(path, tensors)

    async def at_once(*_: object) -> None:
        return None

    monkeypatch.setattr(fsync_files, "write_tensors", slow)
    if not waits:
        monkeypatch.setattr(Trainer, "checkpoint_written", at_once)
    await training.fill(1)
    async with training.service(1) as service:
        servicer = cast(TrainerServicer, service.servicers[0][1])
        running = asyncio.ensure_future(service.background[0]())
        while not training.published():
            await asyncio.sleep(0.01)
        asked = servicer.HoldCheckpoint(pb.HoldCheckpointRequest(step=1), CONTEXT)
        holding = asyncio.ensure_future(asked)
        await asyncio.wait({holding}, timeout=0.2)
        go_on.set()
        assert (await holding).held == waits
        await running


@pytest.mark.parametrize(("rpc", "step"), [("HoldCheckpoint", -1), ("KeepCheckpoint", 0)])
async def test_a_step_that_cannot_be_is_named(training: Training, rpc: str, step: int) -> None:
    """With the cure."""
    async with training.service(1) as service:
        servicer = cast(TrainerServicer, service.servicers[0][1])
        with pytest.raises(ServiceError, match="step"):
            await getattr(servicer, rpc)(getattr(pb, f"{rpc}Request")(step=step), CONTEXT)
