"""The whole process against real gRPC neighbours."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from seamflow.errors import StaleEpochError
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb2

from tests.lib.trained_samples import steps_with_samples
from tests.lib.trainer.child import Child
from tests.lib.trainer.services import Neighbours
from tests.lib.trainer.support import (
    JOB_CONFIG,
    make_samples,
    trainer_config,
)
from trainer.cli import build
from trainer.commands import Command, Optimize
from trainer.config import TrainerConfig
from trainer.data.token_sequence import sequence
from trainer.ranks.worker import Worker

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture
async def neighbours(tmp_path: Path) -> AsyncIterator[Neighbours]:
    """A ledger, a weight store and a scheduler."""
    around = Neighbours(tmp_path / "weights")
    async with around.serving():
        yield around


@pytest.mark.long(short="tests/system/trainer/test_process.py")
async def test_two_ranks_train_publish_and_lend_their_nodes_while_no_batch_is_ready(
    tmp_path: Path, model: Path, neighbours: Neighbours
) -> None:
    """A gang under torchrun starts suspended, is resumed for work, gives its nodes back."""
    child = Child(tmp_path, model, neighbours)
    lender, ledger = neighbours.lender, neighbours.ledger
    ledger.on_lease = lambda step: ledger.ready.clear() if step == 2 else None
    flags = ("--num-steps", "4", "--scheduler", neighbours.address)
    await child.start(*flags, launcher=TORCHRUN)

    async def switch(resume: bool, epoch: int) -> None:
        async with child.client() as stub:
            if resume:
                await stub.Resume(trainer_pb2.ResumeRequest(epoch=epoch))
                return
            response = await stub.Suspend(trainer_pb2.SuspendRequest(epoch=epoch))
            assert response.num_bytes > 0
            status = await stub.GetStatus(trainer_pb2.GetStatusRequest())
            if not lender.calls.count("release") > 1:
                assert status.state == trainer_pb2.TRAINER_STATE_SUSPENDED
                assert (status.step, status.world_size) == (2, 2)
                # The second may still be written while the nodes are given back.
                assert status.weight_version in (1, 2)
                ledger.ready.set()

    lender.switch = switch
    code, output = await child.finish()
    assert code == 0, output
    assert lender.calls == ["request", "release", "request", "release"]
    assert [(m.step, m.weight_version) for m in neighbours.weights.manifests] == [
        (step, step) for step in (1, 2, 3, 4)
    ]
    assert ledger.bases == {1: 0, 2: 1, 3: 2, 4: 3}
    assert ledger.committed == 4
    records = steps_with_samples(child.metrics_file)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert {"loss", "reward_mean", "grad_norm", "num_tokens", "max_staleness"} <= set(records[0])
    for record, base in zip(records, (0, 1, 2, 3), strict=True):
        samples = map(sequence, make_samples(record["step"], record["num_groups"]))
        versions = np.concatenate([item.weight_versions_T[item.loss_mask_T] for item in samples])
        assert record["staleness_mean"] == pytest.approx(base - versions.mean())


@pytest.mark.long(short="tests/system/trainer/test_process.py")
async def test_a_crash_between_checkpoint_and_commit_trains_each_sample_once(
    tmp_path: Path, model: Path, neighbours: Neighbours, straight_run: Path
) -> None:
    """SIGKILL between checkpoint and CommitStep: the resumed run equals an undisturbed one."""
    child = Child(tmp_path, model, neighbours)
    ledger = neighbours.ledger

    def kill_once(step: int) -> None:
        if step == 3 and ledger.epoch == 1:
            os.kill(child.process.pid, signal.SIGKILL)
            raise ConnectionError

    ledger.on_commit = kill_once
    await child.start("--num-steps", "10")
    code, output = await child.finish()
    assert code == -signal.SIGKILL, output
    assert ledger.committed == 2

    await child.start("--num-steps", "10", "--resume")
    code, output = await child.finish()
    assert code == 0, output
    assert ledger.committed == 10
    records = steps_with_samples(child.metrics_file)
    assert [record["step"] for record in records] == list(range(1, 11))
    trained = [name for record in records for name in record["sample_ids"]]
    assert trained == [name for step in range(1, 11) for name in ledger.leased[step]]
    assert len(set(trained)) == len(trained)
    newest = neighbours.weights.manifests[-1]
    assert newest.step == 10
    published = load_file(neighbours.weights.folder(newest.weight_version) / "model.safetensors")
    straight = load_file(straight_run / "weights.safetensors")
    assert published.keys() == straight.keys()
    assert all(published[name].equal(straight[name]) for name in straight)


async def test_a_checkpoint_lost_after_its_commit_is_noticed(
    tmp_path: Path, model: Path, neighbours: Neighbours
) -> None:
    """Negative control: committing before the checkpoint is durable trains on other samples."""
    config = in_process(tmp_path, model, neighbours, num_steps=3)
    async with build(config) as service:
        await service.background[0]()
    before = steps_with_samples(tmp_path / "metrics.jsonl")[-1]["sample_ids"]
    shutil.rmtree(config.checkpoint.folder / "step_000000003")
    async with build(config.replace(resume=True)) as service:
        await service.background[0]()
    records = steps_with_samples(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3]
    assert not set(records[-1]["sample_ids"]) & set(before)
    # The undone step's weights were replaced by a new version, never by the same one again.
    steps = [(manifest.step, manifest.weight_version) for manifest in neighbours.weights.manifests]
    assert steps == [(1, 1), (2, 2), (3, 3), (2, 4), (3, 5)]


async def test_an_old_trainer_ends_when_a_new_one_has_taken_over(
    tmp_path: Path, model: Path, neighbours: Neighbours
) -> None:
    """The fence moves on during the first step: the loop raises and nothing more is committed."""

    def take_over(step: int) -> None:
        neighbours.ledger.epoch += 1

    neighbours.ledger.on_commit = take_over
    async with build(in_process(tmp_path, model, neighbours, num_steps=5)) as service:
        with pytest.raises(StaleEpochError):
            await service.background[0]()
    assert neighbours.ledger.committed == 1
    # The step was committed during the next one.
    assert set(neighbours.ledger.leased) <= {1, 2}


async def test_a_publish_that_must_wait_is_postponed_while_training_continues(
    tmp_path: Path, model: Path, neighbours: Neighbours
) -> None:
    """The next step starts from the version that is out; the last one publishes in any case."""
    neighbours.ledger.num_refused = 2
    async with build(in_process(tmp_path, model, neighbours, num_steps=5)) as service:
        await service.background[0]()
    steps = [(manifest.step, manifest.weight_version) for manifest in neighbours.weights.manifests]
    assert steps == [(3, 1), (4, 2), (5, 3)]
    assert neighbours.ledger.bases == {1: 0, 2: 0, 3: 0, 4: 1, 5: 2}
    assert neighbours.ledger.asked == [1, 1, 1, 2]


async def test_a_postponed_publish_is_due_at_the_next_step(
    tmp_path: Path, model: Path, neighbours: Neighbours
) -> None:
    """Even if that step would not publish otherwise."""
    neighbours.ledger.num_refused = 1
    config = in_process(tmp_path, model, neighbours, num_steps=4, publish__every=2)
    async with build(config) as service:
        await service.background[0]()
    assert [manifest.step for manifest in neighbours.weights.manifests] == [3, 4]


async def _completed(loop: Awaitable[None]) -> None:
    """Wait for `loop`: a task group takes coroutines only."""
    await loop


async def test_leases_are_kept_alive_until_they_are_committed(
    tmp_path: Path, model: Path, neighbours: Neighbours
) -> None:
    """Waiting for step 3, with the leases of steps 1 and 2 uncommitted, it extends them."""
    ledger = neighbours.ledger
    ledger.on_lease = lambda step: ledger.ready.clear() if step == 2 else None
    config = in_process(tmp_path, model, neighbours, num_steps=4, checkpoint__every=4)
    async with build(config) as service, asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(_completed(service.background[1]()))
        training = tasks.create_task(_completed(service.background[0]()))
        while ledger.awaited_step < 3:
            await asyncio.sleep(0.01)
        ledger.extended.clear()
        await ledger.extended.wait()
        ledger.ready.set()
        await training
        keeping.cancel()
    assert ledger.committed == 4


async def test_a_checkpoint_asked_for_during_a_step_is_of_that_step(
    tmp_path: Path,
    model: Path,
    neighbours: Neighbours,
    straight_run: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SaveCheckpoint comes while step 5 is computed: what it calls step 5 are step 5's weights."""
    computing, go_on = asyncio.Event(), threading.Event()
    loop, do = asyncio.get_running_loop(), Worker.do

    def gated(worker: Worker, command: Command) -> dict[str, float]:
        if isinstance(command, Optimize) and command.step == 5:
            loop.call_soon_threadsafe(computing.set)
            assert go_on.wait(20)
        return do(worker, command)

    monkeypatch.setattr(Worker, "do", gated)
    config = in_process(tmp_path, model, neighbours, num_steps=6, checkpoint__every=6, **JOB_CONFIG)
    async with build(config) as service:
        [(_, servicer)] = service.servicers
        training = asyncio.ensure_future(service.background[0]())
        await computing.wait()
        status = await servicer.GetStatus(trainer_pb2.GetStatusRequest(), None)
        assert (status.step, status.checkpoint_step) == (4, 0)
        request = trainer_pb2.SaveCheckpointRequest()
        saving = asyncio.gather(*(servicer.SaveCheckpoint(request, None) for _ in range(2)))
        for _ in range(3):  # until both wait for the step
            await asyncio.sleep(0)
        go_on.set()
        assert [response.step for response in await saving] == [5, 5]
        assert neighbours.ledger.committed == 5
        await training
    saved = config.checkpoint.folder / "step_000000005"
    state = json.loads((saved / "state.json").read_text())
    assert (state["step"], state["record"]["step"]) == (5, 5)
    straight = straight_run / "checkpoints" / saved.name
    shard = "rank_00000_of_00001.safetensors"
    tensors, expected = load_file(saved / shard), load_file(straight / shard)
    assert tensors.keys() == expected.keys()
    assert all(tensors[name].equal(expected[name]) for name in expected)


async def test_a_checkpoint_gives_back_nodes_that_it_took_while_they_were_lent(
    tmp_path: Path, model: Path, neighbours: Neighbours
) -> None:
    """The trainer waits for a batch that only they can fill; finished, it has them no more."""
    lender, ledger = neighbours.lender, neighbours.ledger
    ledger.on_lease = lambda step: ledger.ready.clear() if step == 2 else None
    config = in_process(
        tmp_path, model, neighbours, num_steps=3, checkpoint__every=3, scheduler=neighbours.address
    )
    async with build(config) as service:
        [(_, servicer)] = service.servicers

        async def switch(resume: bool, epoch: int) -> None:
            if resume:
                await servicer.Resume(trainer_pb2.ResumeRequest(epoch=epoch), None)
            else:
                await servicer.Suspend(trainer_pb2.SuspendRequest(epoch=epoch), None)

        lender.switch = switch
        training = asyncio.ensure_future(service.background[0]())
        await ledger.awaited.wait()
        saved = await servicer.SaveCheckpoint(trainer_pb2.SaveCheckpointRequest(), None)
        assert (saved.step, ledger.committed) == (2, 2)
        assert lender.calls == ["request", "release"] * 2
        ledger.ready.set()
        await training
        status = await servicer.GetStatus(trainer_pb2.GetStatusRequest(), None)
        assert (status.state, status.suspended) == (trainer_pb2.TRAINER_STATE_FINISHED, True)
    assert lender.calls == ["request", "release"] * 3


def in_process(
    folder: Path, model: Path, neighbours: Neighbours, **values: object
) -> TrainerConfig:
    """The config of a trainer that runs in the test's own process."""
    return trainer_config(
        run_id="r",
        model=model,
        checkpoint__folder=folder / "checkpoints",
        tracking__metrics_file=folder / "metrics.jsonl",
        trajectory_manager=neighbours.address,
        weights=neighbours.address,
        **values,
    )
