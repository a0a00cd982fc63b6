"""Checkpoints are written during the next step; commits wait for them, publishes do not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from services.chassis.errors import DependencyUnavailable
from tests.lib.trainer.support import read_lines
from tests.lib.trainer.training import Training
from trainer import fsync_files
from trainer.background.async_checkpointer import AsyncCheckpointer
from trainer.background.background_task import BackgroundTask, run_with_background
from trainer.checkpoint import checkpoint_files
from trainer.clients.sample_client import SampleClient
from trainer.policy.policy import Policy
from trainer.publish.publisher import Publisher
from trainer.ranks.rank_group import RankGroup, RankLostError

STEPS = 4
TIMEOUT_SECONDS = 20.0


class SlowDisk:
    """Writes a step's shard only when the step after it was trained; the last one's at once."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, wait_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        self.events: list[tuple[str, int]] = []
        self.num_begun = 0
        self._timeout = wait_seconds
        self._trained = [threading.Event() for _ in range(STEPS + 1)]
        self._monkeypatch = monkeypatch
        self._optimize, self._write = Policy.optimize, fsync_files.write_tensors
        monkeypatch.setattr(Policy, "optimize", self._optimized())
        monkeypatch.setattr(fsync_files, "write_tensors", self.write)
        complete = checkpoint_files.complete

        def completed(partial: Path, state: checkpoint_files.Checkpoint, keep: int) -> Path:
            folder = complete(partial, state, keep)
            self.events.append(("durable", state.step))
            return folder

        monkeypatch.setattr(checkpoint_files, "complete", completed)
        self._note(SampleClient, "commit", "committed", lambda _samples, step: int(step))
        # Each step publishes, so that a version has the number of its step.
        self._note(Publisher, "_commit", "published", lambda _publisher, r: int(r.weight_version))

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Wait if it is a shard's, then write."""
        if path.name.startswith("rank_"):
            self.num_begun += 1
            step = int(path.parent.name.rpartition("_")[2])
            if not self._trained[min(step + 1, STEPS)].wait(self._timeout):
                raise OSError(f"step {step + 1} was not trained while a checkpoint was written")
        self._write(path, tensors)

    def go_on(self) -> None:
        """Write whatever was trained since."""
        for trained in self._trained:
            trained.set()

    def _optimized(self) -> Any:
        trained, optimize = self._trained, self._optimize

        def wrapped(policy: Policy, step: int) -> dict[str, float]:
            found = optimize(policy, step)
            trained[step].set()
            return found

        return wrapped

    def _note(self, owner: type, name: str, event: str, number: Any) -> None:
        call = getattr(owner, name)

        async def noted(*given: Any, **named: Any) -> Any:
            self.events.append((event, number(*given)))
            return await call(*given, **named)

        self._monkeypatch.setattr(owner, name, noted)


class DiskAfterPublish(SlowDisk):
    """Writes a step's shard only when its weights are published."""

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Wait if it is a shard's, then write."""
        if path.name.startswith("rank_"):
            until = time.monotonic() + TIMEOUT_SECONDS
            step = int(path.parent.name.rpartition("_")[2])
            while ("published", step) not in self.events:
                if time.monotonic() > until:
                    raise OSError(f"step {step} was not published before its checkpoint")
                time.sleep(0.002)
        self.go_on()
        super().write(path, tensors)


async def test_a_step_is_trained_while_the_checkpoint_before_it_is_written(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each step in turn: durable, then its samples committed."""
    disk = SlowDisk(monkeypatch)
    records = await (await training.fill(STEPS)).train(STEPS)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for step in range(1, 5):
        assert disk.events.index(("durable", step)) < disk.events.index(("committed", step))
    for name in ("durable", "committed", "published"):
        assert [number for event, number in disk.events if event == name] == [1, 2, 3, 4]
    assert (await training.readiness()).committed_step == STEPS


async def test_without_overlap_the_disk_would_hold_training_up(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: wait for each checkpoint, and the next step is not trained in time."""
    SlowDisk(monkeypatch, wait_seconds=1.0)
    start = AsyncCheckpointer.start

    async def waiting(checkpointer: AsyncCheckpointer, *given: Any) -> None:
        await start(checkpointer, *given)
        await checkpointer.wait()

    monkeypatch.setattr(AsyncCheckpointer, "start", waiting)
    with pytest.raises(DependencyUnavailable, match="step 2 was not trained"):
        await (await training.fill(STEPS)).train(STEPS)


async def test_weights_do_not_wait_for_their_checkpoint(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is written only when its weights are published."""
    disk = DiskAfterPublish(monkeypatch)
    await (await training.fill(STEPS)).train(STEPS)
    for step in range(1, STEPS + 1):
        assert disk.events.index(("published", step)) < disk.events.index(("durable", step))


async def test_weights_that_waited_would_be_noticed(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: checkpoint and weights wait for each other; the disk gives up."""
    monkeypatch.setattr(f"{__name__}.TIMEOUT_SECONDS", 1.0)
    disk = DiskAfterPublish(monkeypatch)
    commit = Publisher._commit

    async def waiting(publisher: Publisher, request: Any) -> None:
        while ("durable", request.weight_version) not in disk.events:
            await asyncio.sleep(0.002)
        await commit(publisher, request)

    monkeypatch.setattr(Publisher, "_commit", waiting)
    with pytest.raises(DependencyUnavailable, match="step 1 was not published before"):
        await (await training.fill(STEPS)).train(STEPS)


async def test_a_failing_checkpoint_ends_training_immediately(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the trainer waits for samples that never come; none of its samples is committed."""
    write = fsync_files.write_tensors

    def full(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        if path.name.startswith("rank_"):
            raise OSError("no space left")
        write(path, tensors)

    monkeypatch.setattr(fsync_files, "write_tensors", full)
    await training.fill(STEPS, rollouts=6)
    async with asyncio.timeout(TIMEOUT_SECONDS):
        with pytest.raises(DependencyUnavailable, match="no space left"):
            await training.train(STEPS)
    assert len(read_lines(training.metrics_file)) == 1
    assert (await training.readiness()).committed_step == 0


async def test_the_error_of_a_background_task_is_raised_in_every_waiter() -> None:
    """In the first `wait`, in later ones, and in `run_with_background`."""
    task = BackgroundTask()

    async def fails() -> None:
        await asyncio.sleep(0.01)
        raise OSError("no space left")

    task.start(fails())
    for _ in range(2):
        with pytest.raises(OSError, match="no space left"):
            await task.wait()
    with pytest.raises(OSError, match="no space left"):
        task.raise_if_failed()
    with pytest.raises(OSError, match="no space left"):
        await run_with_background(asyncio.sleep(TIMEOUT_SECONDS, None), task)


async def test_a_checkpoint_that_lost_a_shard_is_dropped_and_the_last_one_repeated(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one covers its step: in the end all samples are committed, of which none twice."""
    wait, dropped, disk = RankGroup.wait_written, set[str](), SlowDisk(monkeypatch)
    disk.go_on()

    async def losing(ranks: RankGroup, folder: Path) -> None:
        await wait(ranks, folder)
        step = int(folder.name.rpartition("_")[2])
        if step in (2, STEPS) and folder.name not in dropped:
            dropped.add(folder.name)
            raise RankLostError("a rank was lost")

    monkeypatch.setattr(RankGroup, "wait_written", losing)
    records = await (await training.fill(STEPS)).train(STEPS)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert len(dropped) == 2
    assert [step for event, step in disk.events if event == "durable"] == [1, 3, 4]
    assert (await training.readiness()).committed_step == STEPS


async def test_a_stop_waits_for_the_checkpoint_under_way(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draining ends when it is durable and committed: the step need not be trained again."""
    disk = SlowDisk(monkeypatch)
    await training.fill(STEPS, rollouts=6)
    async with training.service(STEPS) as service:
        work = asyncio.ensure_future(service.background[0]())
        # The step has handed its checkpoint over when it publishes; files are begun before.
        while ("published", 1) not in disk.events:
            await asyncio.sleep(0.01)
        assert disk.num_begun
        assert service.drain is not None
        draining = asyncio.ensure_future(service.drain())
        done, _ = await asyncio.wait({draining}, timeout=0.2)
        assert not done
        disk.go_on()
        await draining
        events = [event for event in disk.events if event[0] != "published"]
        assert events == [("durable", 1), ("committed", 1)]
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    assert (await training.readiness()).committed_step == 1


async def test_a_trainer_resumes_from_the_last_checkpoint_of_a_fenced_one(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last checkpoint comes after the new one has looked: no step is trained on other samples.

    Committed samples are never leased again, so resuming before that checkpoint would lose them.
    """
    await training.fill(STEPS)
    before = await training.train(2)
    newest = training.checkpoints / "step_000000002"
    late = newest.rename(training.checkpoints / "late")
    reconcile, steps = SampleClient.reconcile, list[int]()

    async def fenced_late(samples: SampleClient, step: int) -> None:
        if not steps:
            late.rename(newest)
        steps.append(step)
        await reconcile(samples, step)

    monkeypatch.setattr(SampleClient, "reconcile", fenced_late)
    records = await training.train(3)
    assert steps == [1, 2]
    assert [record["sample_ids"] for record in records[:2]] == [r["sample_ids"] for r in before]
    assert not set(records[2]["sample_ids"]) & {s for r in before for s in r["sample_ids"]}
