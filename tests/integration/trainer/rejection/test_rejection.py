"""A group that cannot be trained costs its own samples and nothing more."""

from __future__ import annotations

import math
import re
from typing import Any

import grpc.aio
import pytest
from seamflow.trajectory.v1 import task_service_pb2 as task_pb

from services.chassis.errors import ConfigError
from tests.lib.trainer.rejection.poisons import GOOD, POISONS, Group, record
from tests.lib.trainer.training import Training, groups
from trainer.leasing.accepted_samples import AcceptedSamples, SampleReader
from trainer.step.step_runner import StepRunner
from trainer.tracking.step_record import StepRecord
from trajectory_manager.api import record_groups, validation

NOT_SEEN_AT_THE_DOOR = ("vocabulary", "reward name")


@pytest.fixture
def open_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trajectory manager that takes what the last release took, and more."""
    monkeypatch.setattr(record_groups, "MIN_TEMPERATURE", 0.0)
    monkeypatch.setattr(validation, "MAX_REWARD", math.inf)
    monkeypatch.setattr(validation, "_check_logprobs", lambda field, values: None)
    monkeypatch.setattr(validation, "reward", lambda field, value: value)


async def fill(training: Training, bad: Group, **rules: Any) -> None:
    """Two steps of three groups, of which the second is bad, and one more."""
    await training.begin(max_staleness=4, **rules)
    made = [GOOD("t0"), bad("t1"), *(GOOD(f"t{number}") for number in range(2, 7))]
    await training.client.trajectories.RecordGroups(record(training.client.run_id, *made))


async def dead_letters(training: Training) -> list[task_pb.DeadLetter]:
    """Of the run."""
    request = task_pb.ListDeadLettersRequest(run_id=training.client.run_id)
    return list((await training.client.tasks.ListDeadLetters(request)).dead_letters)


@pytest.mark.parametrize("name", [name for name in POISONS if name not in NOT_SEEN_AT_THE_DOOR])
async def test_what_can_be_checked_is_refused_at_the_door(training: Training, name: str) -> None:
    """The error names the field."""
    bad, _ = POISONS[name]
    with pytest.raises(grpc.aio.AioRpcError, match=r"groups\[1\]\.rollouts\[[01]\]") as caught:
        await fill(training, bad)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.usefixtures("open_door")
@pytest.mark.parametrize("name", POISONS)
async def test_the_trainer_replaces_a_group_that_it_cannot_train(
    training: Training, name: str
) -> None:
    """Two steps of whole batches without it, a dead letter and an alarm that say why."""
    bad, reason = POISONS[name]
    await fill(training, bad)
    async with training.service(2, algorithm__reward="reward") as trainer:
        await trainer.background[0]()
        status = trainer.servicers[0][1]._trainer.alarms.texts
    first, second = training.records()
    assert groups(first)[::2] == ["t0/0", "t2/0", "t3/0"]
    assert groups(second)[::2] == ["t4/0", "t5/0", "t6/0"]
    assert all(math.isfinite(each["grad_norm"]) for each in (first, second))
    (letter,) = await dead_letters(training)
    assert letter.reason == task_pb.DEAD_LETTER_REASON_REJECTED
    for text in (letter.message, *status):
        assert re.search(reason, text), text
    assert len(status) == 1


@pytest.mark.usefixtures("open_door")
async def test_a_streamed_step_goes_on_without_it(training: Training) -> None:
    """Its page is leased again, and what was accumulated before stays."""
    bad, _ = POISONS["vocabulary"]
    await fill(training, bad)
    first, _ = await training.train(2, batch__stream_groups=1, batch__micro_batch_tokens=8)
    assert groups(first)[::2] == ["t0/0", "t2/0", "t3/0"]


@pytest.mark.usefixtures("open_door")
async def test_a_repeated_step_has_the_groups_it_was_trained_on(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that dies after the rejection, before the commit, changes nothing."""
    await fill(training, POISONS["reward"][0])

    class CrashError(Exception):
        pass

    optimize, before = StepRunner.optimize, list[dict[str, Any]]()

    async def crash(self: StepRunner, record: StepRecord, **given: Any) -> None:
        await optimize(self, record, **given)
        before.append(record.line() | record.samples())
        raise CrashError

    with monkeypatch.context() as patch:
        patch.setattr(StepRunner, "optimize", crash)
        with pytest.raises(CrashError):
            await training.train(1)
    first, _ = await training.train(2)
    assert first["sample_ids"] == before[0]["sample_ids"]
    assert (first["loss"], first["grad_norm"]) == (before[0]["loss"], before[0]["grad_norm"])
    assert len(await dead_letters(training)) == 1


@pytest.mark.usefixtures("open_door")
async def test_a_trainer_ends_when_no_group_can_be_trained(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All agents err: a dead letter for each of their groups would help nobody."""
    monkeypatch.setattr("trainer.leasing.accepted_samples._MAX_REJECTED_GROUPS", 5)
    await training.begin(max_staleness=4)
    made = [POISONS["reward name"][0](f"t{number}") for number in range(6)]
    await training.client.trajectories.RecordGroups(record(training.client.run_id, *made))
    with pytest.raises(ConfigError, match=r"6 groups in a row .* has no reward 'reward'"):
        await training.train(1, algorithm__reward="reward")
    assert len(await dead_letters(training)) == 3, "the last ones wait for a corrected trainer"


@pytest.mark.usefixtures("open_door")
@pytest.mark.parametrize("name", ["greedy", "vocabulary", "reward name", "no log-prob"])
async def test_without_the_check_one_group_ends_the_run(
    training: Training, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: each start of the trainer ends the same way, and no step is made."""
    monkeypatch.setattr(SampleReader, "_check", lambda self, item: None)
    monkeypatch.setattr(AcceptedSamples, "reject", _raises)
    await fill(training, POISONS[name][0])
    for _ in range(2):
        with pytest.raises((ValueError, IndexError, ArithmeticError, RuntimeError)):
            await training.train(2, algorithm__reward="reward")
    assert not training.records()


async def _raises(self: AcceptedSamples, step: int, messages: dict[str, str]) -> None:
    raise ValueError(messages)


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ({"reward": 1.0, "rewrad": 0.5}, ["'rewrad' (did you mean 'reward'?)"]),
        ({"reward": 1.0}, []),
    ],
)
async def test_a_weight_of_a_reward_that_no_rollout_has_is_an_alarm(
    training: Training, weights: dict[str, float], told: list[str]
) -> None:
    """Once, with the first rollouts that train; it counts 0 in them. Control: without it none."""
    await training.fill(2)
    async with training.service(2, algorithm__reward_weights=weights) as trainer:
        await trainer.background[0]()
        alarms = list(trainer.servicers[0][1]._trainer.alarms.texts)
    assert len(alarms) == len(told)
    for alarm, part in zip(alarms, told, strict=True):
        assert f"algorithm.reward_weights names {part}" in alarm
