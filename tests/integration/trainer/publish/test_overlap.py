"""Publishing continues during the next step; training waits for it only at its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from services.chassis.errors import DependencyUnavailable
from tests.lib.trainer.support import read_lines
from tests.lib.trainer.training import Training
from trainer.background import async_publisher
from trainer.background.async_publisher import AsyncPublisher
from trainer.policy.policy import Policy
from trainer.publish import bucket_writer, publisher
from trainer.publish.snapshot_weights import SnapshotLostError
from trainer.publish.weight_folder import write_weights

STEPS = 4
TIMEOUT_SECONDS = 20.0


class SlowDisk:
    """Writes a step's weights only when the step after it was trained; the last one's at once."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, wait_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        self.num_writes = 0
        self._timeout = wait_seconds
        self._trained = [threading.Event() for _ in range(STEPS + 2)]
        self._optimize, self._write = Policy.optimize, write_weights
        monkeypatch.setattr(Policy, "optimize", self._optimized())
        monkeypatch.setattr(bucket_writer, "write_weights", self.write)

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor], *, durable: bool) -> Any:
        """Wait, then write."""
        self.num_writes += 1
        after = min(self.num_writes + 1, STEPS)
        if not self._trained[after].wait(self._timeout):
            raise OSError(f"step {after} was not trained while weights were written")
        return self._write(path, tensors, durable=durable)

    def _optimized(self) -> Any:
        trained, optimize = self._trained, self._optimize

        def wrapped(policy: Policy, step: int) -> dict[str, float]:
            found = optimize(policy, step)
            trained[step].set()
            return found

        return wrapped


async def test_a_step_is_trained_while_the_weights_before_it_are_written(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write ends after the next step, and all versions come out, the last one in time."""
    disk = SlowDisk(monkeypatch)
    records = await (await training.fill(STEPS)).train(STEPS)
    assert disk.num_writes == STEPS
    assert [record["weight_version"] for record in records] == [1, 2, 3, 4]
    # What a step is compared with is the version under way.
    assert [record["base_weight_version"] for record in records] == [0, 1, 2, 3]


async def test_without_overlap_the_disk_would_hold_training_up(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: wait for each publish, and the next step is not trained in time."""
    SlowDisk(monkeypatch, wait_seconds=1.0)
    start = AsyncPublisher.start

    async def waiting(publisher: AsyncPublisher, *given: Any) -> None:
        await start(publisher, *given)
        await publisher.wait()

    monkeypatch.setattr(AsyncPublisher, "start", waiting)
    with pytest.raises(DependencyUnavailable, match="step 2 was not trained"):
        await (await training.fill(STEPS)).train(STEPS)


async def test_a_failing_write_ends_training_immediately(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even while the trainer waits for samples that never come."""

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("no space left")

    monkeypatch.setattr(bucket_writer, "write_weights", broken)
    await training.fill(STEPS, rollouts=12)
    async with asyncio.timeout(TIMEOUT_SECONDS):
        with pytest.raises(DependencyUnavailable, match="no space left"):
            await training.train(STEPS, publish__every=2)
    assert len(read_lines(training.metrics_file)) == 2


@pytest.mark.parametrize(("failures", "versions"), [(1, [0, 1, 1, 2]), (10**9, [0, 1, 1, 2])])
async def test_a_postponed_publish_is_retried_until_newer_weights_supersede_it(
    training: Training, monkeypatch: pytest.MonkeyPatch, failures: int, versions: list[int]
) -> None:
    """Under the same number, which what is sampled is compared with all the time."""
    finish, tried = publisher.Publisher.finish, list[int]()

    async def failing(self: publisher.Publisher, begun: Any, *given: Any, **named: Any) -> None:
        tried.append(begun.weight_version)
        if begun.weight_version == 1 and len(tried) <= failures:
            await asyncio.sleep(0.01)
            raise publisher.PublishPostponed("writing", 1.0, "try again")
        await finish(self, begun, *given, **named)

    monkeypatch.setattr(publisher.Publisher, "finish", failing)
    records = await (await training.fill(STEPS)).train(STEPS, publish__every=2)
    assert [record["weight_version"] for record in records] == versions
    assert tried.count(1) >= 2
    assert tried.count(2) == 1
    published = {path.name for path in training.published()}
    assert len(published) == (2 if failures == 1 else 1)


async def test_a_publish_that_lost_a_rank_is_postponed_to_newer_weights(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its part of the snapshot is gone: the next step publishes, though it would not have."""
    finish, tried = publisher.Publisher.finish, list[int]()

    async def failing(self: publisher.Publisher, begun: Any, *given: Any, **named: Any) -> None:
        tried.append(begun.weight_version)
        if begun.weight_version == 1:
            raise SnapshotLostError("a rank was lost")
        await finish(self, begun, *given, **named)

    monkeypatch.setattr(publisher.Publisher, "finish", failing)
    monkeypatch.setattr(async_publisher, "_RETRY_SECONDS", 0.0)
    records = await (await training.fill(STEPS)).train(STEPS, publish__every=2)
    assert tried == [1, 2, 3]
    assert [record["weight_version"] for record in records][2:] == [2, 3]
    assert len(training.published()) == 2


async def test_a_version_is_published_again_that_a_crash_cut_off_between_two(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step later, which itself would not have been published."""
    finish = publisher.Publisher.finish

    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(publisher.Publisher, "finish", never)
    await training.fill(STEPS, rollouts=18)
    # Either trains until three steps are made, and waits for more samples.
    await _train_until(training, lambda: len(training.records()) == 3)
    assert training.published() == []
    monkeypatch.setattr(publisher.Publisher, "finish", finish)
    await _train_until(training, lambda: bool(training.published()))
    assert len(training.published()) == 1


async def _train_until(training: Training, done: Callable[[], bool]) -> None:
    """Train, publishing every second step, and stop as a crash does."""
    life = asyncio.create_task(training.train(6, publish__every=2))
    while not done():
        assert not life.done()
        await asyncio.sleep(0.05)
    life.cancel()
    await asyncio.gather(life, return_exceptions=True)
