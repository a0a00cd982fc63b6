"""A checkpoint whose steps the store does not know: training goes on by a flag alone."""

from __future__ import annotations

import pytest
from seamflow.trajectory.v1 import run_service_pb2 as pb

from tests.lib.trainer.training import Training
from trainer.checkpoint.checkpoint_files import WrongCheckpoint


async def test_steps_that_the_store_has_lost_are_named_and_need_a_flag(training: Training) -> None:
    """Control: with the store as it was, the second trainer goes on without it."""
    await training.fill(2)
    await training.train(1)
    await training.train(2)
    runs = training.client.runs
    await runs.EndRun(pb.EndRunRequest(run_id=training.client.run_id))
    await runs.DeleteRun(pb.DeleteRunRequest(run_id=training.client.run_id))
    await training.begin(*(f"u{number}" for number in range(3)), max_staleness=2)
    with pytest.raises(
        WrongCheckpoint, match=r"lost the samples .* steps 1 to 2\. .*, set trainer"
    ):
        await training.train(3)
    await training.play(6)
    async with training.service(3, accept_lost_samples=True) as trainer:
        await trainer.background[0]()
        (alarm,) = trainer.servicers[0][1]._trainer.alarms.texts
    assert "steps 1 to 2" in alarm
    assert [record["step"] for record in training.records()] == [1, 2, 3]
