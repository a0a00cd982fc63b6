"""A group that ends the trainer is found by the trainers that follow, and replaced.

Here a trainer ends by an exception; `make chaos-edges` kills real processes.
"""

from __future__ import annotations

from typing import Any

import pytest
from seamflow.trajectory.v1 import task_service_pb2 as task_pb

from tests.lib.trainer.rejection.poisons import GOOD, record
from tests.lib.trainer.training import Training, groups
from trainer.step.batch_trial import Trial

MODULE = "tests.lib.trainer.rejection.dying_algorithm"
MAX_STARTS = 6
"""As often as `seamflow train` starts a process that does not recover."""


async def fill(training: Training) -> None:
    """Two steps of three groups, and one more."""
    await training.begin(max_staleness=4)
    made = [GOOD(f"t{number}") for number in range(7)]
    await training.client.trajectories.RecordGroups(record(training.client.run_id, *made))


async def ends(training: Training, **values: Any) -> int:
    """How many trainers ended before one trained both steps."""
    for number in range(MAX_STARTS):
        try:
            await training.train(2, **values)
        except (KeyError, ArithmeticError):
            continue
        return number
    return MAX_STARTS


@pytest.mark.parametrize(("name", "number"), [("raising", 3), ("overflowing", 2)])
async def test_a_group_that_ends_the_trainer_is_found_and_replaced(
    training: Training, name: str, number: int
) -> None:
    """After two ends of the step, and one of its trial if that ends too."""
    await fill(training)
    assert await ends(training, algorithm__name=f"{MODULE}:{name}") == number
    first, second = training.records()
    assert groups(first)[::2] == ["t0/0", "t2/0", "t3/0"]
    assert groups(second)[::2] == ["t4/0", "t5/0", "t6/0"]
    request = task_pb.ListDeadLettersRequest(run_id=training.client.run_id)
    (letter,) = (await training.client.tasks.ListDeadLetters(request)).dead_letters
    assert (letter.task.task_id, letter.reason) == ("t1", task_pb.DEAD_LETTER_REASON_REJECTED)
    assert not (training.checkpoints / "trial.json").exists()


async def test_without_trials_it_ends_every_trainer(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr("trainer.step.batch_trial._TRIAL_DELIVERIES", 1000)
    await fill(training)
    assert await ends(training, algorithm__name=f"{MODULE}:raising") == MAX_STARTS
    assert not training.records()


async def test_groups_are_tried_with_the_weights_of_their_step(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those before it, which no checkpoint covers, are trained first."""
    await training.fill(3)
    for _ in range(3):
        ended = training.samples()
        await ended.reconcile(0)
        for step in (1, 2, 3):
            await ended.lease(step, step - 1)
    tried, run = list[int](), Trial.run

    async def noted(trial: Trial) -> None:
        tried.append(trial._steps.progress.step)
        await run(trial)

    monkeypatch.setattr(Trial, "run", noted)
    records = await training.train(3, checkpoint__every=9)
    assert tried == [2]
    assert [record["step"] for record in records] == [1, 2, 3]
