"""What a real trainer records of its steps, next to the metrics that its ranks computed."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from seamflow.errors import UnavailableError
from seamflow.trajectory.v1 import sample_service_pb2 as pb
from seamflow.trajectory.v1 import trajectory_pb2

from tests.lib.trainer.training import Training
from trainer.background import sample_recorder
from trainer.clients.sample_client import SampleClient

STREAMED = {"batch__stream_groups": 1, "batch__micro_batch_tokens": 8}
OFTEN = {"algorithm__name": "ppo", "algorithm__num_mini_batches": 3, "algorithm__num_epochs": 2}
HALVES = 2e-3
"""What float16 leaves of a difference, relative."""


async def recorded(training: Training, step: int) -> list[trajectory_pb2.TrainedSample]:
    """With values of tokens."""
    request = pb.ListTrainedSamplesRequest(
        run_id=training.client.run_id, step=step, with_tokens=True
    )
    return list((await training.client.samples.ListTrainedSamples(request)).samples)


def halves(data: bytes) -> NDArray[np.float64]:
    """Values of tokens."""
    return np.frombuffer(data, "<f2").astype(np.float64)


@pytest.mark.parametrize("values", [{}, STREAMED], ids=["whole", "streamed"])
async def test_what_is_recorded_is_what_was_trained(
    training: Training, values: dict[str, Any]
) -> None:
    """Every sample of the ledger; differences and ratios add up to the metrics of the step."""
    await training.fill(2)
    steps = await training.train(2, **values)
    for record in steps:
        samples = await recorded(training, record["step"])
        assert {each.sample_id for each in samples} == set(record["sample_ids"])
        differences = np.concatenate([halves(each.logprob_differences) for each in samples])
        assert len(differences) == record["num_tokens"] > 0
        found = np.abs(differences).mean()
        assert found == pytest.approx(record["train_rollout_logprob_abs_diff"], rel=HALVES)
        assert np.exp(differences).mean() == pytest.approx(record["ratio_mean"], rel=HALVES)
        by_group: dict[str, list[trajectory_pb2.TrainedSample]] = {}
        for each in samples:
            by_group.setdefault(each.group_id, []).append(each)
        for members in by_group.values():
            assert {each.reward for each in members} == {0.0, 1.0}
            assert sum(each.advantage_mean for each in members) == pytest.approx(0, abs=1e-3)
            assert max(members, key=lambda each: each.reward).advantage_mean > 0


async def test_a_summary_agrees_with_its_tokens(training: Training) -> None:
    """Places are those of sampled tokens; staleness counts from the step's base version."""
    await training.fill(2)
    steps = await training.train(2)
    for each in await recorded(training, 2):
        ids = await training.client.get(each.rollout_id)
        spans = [span for turn in ids.turns for span in turn.tokens.spans]
        sampled = sum(span.num_tokens for span in spans if span.server_id)
        assert sum(span.num_tokens for span in each.spans) == each.num_trained_tokens == sampled
        first = spans[0].num_tokens  # the prompt
        assert each.spans[0].start == first
        differences = halves(each.logprob_differences)
        assert each.logprob_difference_max == pytest.approx(np.abs(differences).max())
        assert each.logprob_difference_mean == pytest.approx(np.abs(differences).mean())
        assert each.ratio_max == pytest.approx(np.exp(differences).max())
        assert halves(each.advantages).mean() == pytest.approx(each.advantage_mean)
        assert len(each.advantages) == 2, "one value for all tokens"
        assert each.staleness == steps[1]["base_weight_version"] - each.min_weight_version == 1


async def test_a_step_of_several_updates_is_recorded_as_it_began(training: Training) -> None:
    """Log-probs of all mini-batches are those of the weights before the first update."""
    await training.fill(1)
    (record,) = await training.train(1, **OFTEN)
    samples = await recorded(training, 1)
    assert {each.sample_id for each in samples} == set(record["sample_ids"])
    assert all(len(halves(each.logprob_differences)) for each in samples)
    # A critic gives each token its own advantage.
    assert any(len(each.advantages) > 2 for each in samples)


async def test_nothing_is_recorded_with_0(training: Training) -> None:
    """Negative control."""
    await training.fill(1)
    await training.train(1, tracking__recorded_steps=0)
    assert await recorded(training, 1) == []


async def test_the_newest_steps_stay(training: Training) -> None:
    """As many as the setting says."""
    await training.fill(3)
    await training.train(3, tracking__recorded_steps=2)
    assert await recorded(training, 1) == []
    assert await recorded(training, 2)
    assert await recorded(training, 3)


async def test_a_manager_that_refuses_does_not_stop_training(
    training: Training, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A warning is all."""

    async def refuse(*_: object) -> None:
        raise UnavailableError("no room")

    monkeypatch.setattr(SampleClient, "record_trained", refuse)
    await training.fill(2)
    assert len(await training.train(2)) == 2
    assert capsys.readouterr().out.count("trained_samples_not_recorded") == 2


async def test_a_slow_manager_does_not_delay_training(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one step is recorded others end, and are left out."""
    asked, real, go_on = list[int](), SampleClient.record_trained, asyncio.Event()

    async def wait(client: SampleClient, step: int, *given: Any) -> None:
        asked.append(step)
        await go_on.wait()
        await real(client, step, *given)

    async def finish(recorder: sample_recorder.SampleRecorder) -> None:
        go_on.set()
        await finished(recorder)

    finished = sample_recorder.SampleRecorder.finish
    monkeypatch.setattr(SampleClient, "record_trained", wait)
    monkeypatch.setattr(sample_recorder.SampleRecorder, "finish", finish)
    await training.fill(3)
    assert len(await training.train(3)) == 3
    assert asked == [1]
    assert await recorded(training, 1)
    assert await recorded(training, 2) == []
