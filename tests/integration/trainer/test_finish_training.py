"""FinishTraining: the step in progress is the last one, with all that a last step has."""

from __future__ import annotations

from typing import Any, cast

import pytest
from seamflow.trainer.v1 import trainer_service_pb2 as pb

from tests.lib.trainer.support import read_lines
from tests.lib.trainer.training import Training
from trainer.servicer import TrainerServicer


@pytest.mark.parametrize("is_finished", [True, False])
async def test_the_step_in_progress_is_the_last(training: Training, is_finished: bool) -> None:
    """Checkpointed and published, though neither is due; control: without the call all are made."""
    await training.fill(3)
    settings = {"checkpoint__every": 9, "publish__every": 9}
    async with training.service(3, **settings) as service:
        servicer = cast(TrainerServicer, service.servicers[0][1])
        context = cast(Any, None)
        if is_finished:
            for _ in range(2):  # idempotent
                answer = await servicer.FinishTraining(pb.FinishTrainingRequest(), context)
                assert answer.num_steps == 1
        await service.background[0]()
        status = await servicer.GetStatus(pb.GetStatusRequest(), context)
    last = 1 if is_finished else 3
    assert [line["step"] for line in read_lines(training.metrics_file)] == list(range(1, last + 1))
    assert (status.state, status.step) == (pb.TRAINER_STATE_FINISHED, last)
    assert (status.checkpoint_step, status.weight_version) == (last, 1)
