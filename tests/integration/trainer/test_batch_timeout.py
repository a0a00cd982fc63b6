"""Training on part of a batch: a real trainer on the real trajectory manager and a real Redis."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import run_service_pb2 as run_pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub

from services.chassis.errors import ConfigError
from tests.lib.trainer.training import Training, groups, other_run
from trainer.clients.sample_client import BatchProgress

OVER = {"batch__timeout_seconds": 1e-9}
"""The wait is too long from its beginning on."""


async def test_a_straggler_does_not_hold_the_run_and_is_trained_later(training: Training) -> None:
    """The step takes the complete groups, the next one what was missing: each sample once."""
    await training.begin("a", "b", "c")
    await training.play(5)
    (first,) = await training.train(1, **OVER)
    assert (groups(first), first["num_groups"]) == (["a/0", "a/1", "b/0", "b/1"], 2)
    await training.play(1)
    _, second = await training.train(2, **OVER)
    assert (groups(second), second["num_groups"]) == (["c/0", "c/1"], 1)
    steps = await training.committed_steps()
    assert sorted(steps.values()) == [1, 1, 1, 1, 2, 2]
    assert all(steps[name] == 1 for name in first["sample_ids"])


async def test_without_a_timeout_the_straggler_is_waited_for(training: Training) -> None:
    """Negative control: the same agents, and the step is a whole batch."""
    await training.begin("a", "b", "c")
    await training.play(5)
    (first,), _ = await asyncio.gather(training.train(1), training.play(1))
    assert first["num_groups"] == 3


async def test_a_batch_that_is_whole_is_not_cut(training: Training) -> None:
    """However long its timeout is over."""
    await training.begin("a", "b", "c", "d")
    await training.play(8)
    first, second = await training.train(2, **OVER)
    assert (first["num_groups"], second["num_groups"]) == (3, 1)


async def test_a_timeout_over_nothing_waits_for_the_first_group(training: Training) -> None:
    """There is no step without one."""
    await training.begin("a", "b", "c")
    (first,), _ = await asyncio.gather(training.train(1, **OVER), training.play(2))
    assert groups(first) == ["a/0", "a/1"]


async def test_a_part_is_repeated_as_it_was_after_a_crash(training: Training) -> None:
    """Leased, not committed: the next trainer, without a timeout, gets the same partial batch."""
    await training.begin("a", "b", "c")
    await training.play(4)
    crashed = training.samples()
    await crashed.reconcile(0)
    part = await crashed.lease(1, 0, min_groups=1)
    assert part is not None
    await training.play(2)
    (first,) = await training.train(1)
    assert first["sample_ids"] == [sample.sample_id for sample in part.samples]
    assert first["num_groups"] == 2


async def test_a_partial_batch_is_normalised_by_its_size(
    training: Training, tmp_path: Path
) -> None:
    """Two groups of a batch of three give the weights that a whole batch of these two gives."""
    await training.begin("a", "b", "c")
    await training.play(5)
    (part,) = await training.train(1, **OVER)
    whole = other_run(training, tmp_path / "whole")
    await whole.begin("a", "b", groups_per_step=2)
    await whole.play(4)
    (record,) = await whole.train(1)
    assert groups(record) == groups(part)
    assert record["num_tokens"] == part["num_tokens"]
    assert part["grad_norm"] > 0
    published = whole.weights()
    assert all(tensor.equal(published[name]) for name, tensor in training.weights().items())


async def test_a_part_whose_rollouts_sampled_nothing_is_passed_over(training: Training) -> None:
    """Such a group has no samples; a run that waited for some would wait for ever."""
    await training.begin("a", "b")
    for _ in range(2):
        lease = await training.client.lease()
        await training.client.start(lease.rollout_id, lease.lease_token)
        await training.client.fail(lease.rollout_id)
    (empty,) = await training.train(1, **OVER)
    assert (empty["num_samples"], empty["num_tokens"]) == (0, 0)
    await training.play(2)
    _, second = await training.train(2, **OVER)
    assert groups(second) == ["b/0", "b/1"]


async def test_groups_that_may_not_go_yet_hold_no_nodes(training: Training) -> None:
    """Beyond the fifo_window they are not counted, so the nodes go back to the group ahead."""
    await training.begin("a", "b", "c", "d", groups_per_step=2, fifo_window=2)
    ahead = [await training.client.lease() for _ in range(4)]
    assert all(lease.rollout_id for lease in ahead)
    await training.play(4)
    counts = await training.readiness()
    assert (counts.num_ready_groups, counts.num_kept_back_groups) == (2, 2)
    assert await training.samples().progress(1, 0) == BatchProgress(0, 2)


async def test_rollouts_admitted_during_a_wait_require_its_weights(training: Training) -> None:
    """While a step is trained one batch begins, for the next; then one more, with new weights."""
    await training.begin("a", "b", "c", groups_per_step=1, max_staleness=1)
    samples, client = training.samples(), training.client
    await samples.reconcile(0)
    await samples.progress(1, 0)
    await training.play(2)
    assert await samples.lease(1, 0) is not None
    assert [(await client.lease()).task.task_id for _ in range(3)] == ["b", "b", ""]
    await samples.progress(2, 5)
    lease = await client.lease()
    await client.start(lease.rollout_id, lease.lease_token)
    assert (await client.begin(lease.rollout_id, "t", [1])).required_weight_version == 5


async def test_the_last_step_ends_the_run_until_it_is_trained_further(training: Training) -> None:
    """Agents get no more tasks and learn why; a trainer with further steps starts it again."""
    await training.begin("a", "b", groups_per_step=1)
    await training.play(2)
    await training.train(1, end_run=True)
    request = run_pb.GetRunRequest(run_id=training.client.run_id)
    runs = async_stub(RunServiceStub, training.client.channel)
    assert (await runs.GetRun(request)).run.state == trajectory_pb2.RUN_STATE_ENDED
    assert (await training.client.ask()).empty_reason == trajectory_pb2.EMPTY_REASON_RUN_ENDED
    await training.samples().reconcile(1)
    assert (await runs.GetRun(request)).run.state == trajectory_pb2.RUN_STATE_RUNNING
    await training.play(2)
    assert len(await training.train(2)) == 2


async def test_a_run_that_requires_another_reward_is_not_trained(training: Training) -> None:
    """Its agents are held to a name that this trainer would not find."""
    await training.begin("a", reward_name="success")
    with pytest.raises(ConfigError, match=r"algorithm\.reward is 'reward'.*'success'"):
        await training.train(1)


async def test_a_run_that_generates_ahead_has_no_tail_to_start_at(training: Training) -> None:
    """Its nodes go on with the next batch; one that waits for weights is trained."""
    values = {"scheduler": "127.0.0.1:1", "batch__start_at_tail": True}
    await training.begin("a", max_staleness=1)
    with pytest.raises(ConfigError, match=r"start_at_tail is true, but run .* max_staleness 1"):
        await training.train(1, **values)
