"""A trainer that dies between checkpoints repeats the steps since the newest, exactly."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from services.chassis.rpc.server import Service
from tests.lib.trained_samples import steps_with_samples
from tests.lib.trainer.child import Child
from tests.lib.trainer.services import Neighbours
from tests.lib.trainer.support import JOB_CONFIG, trainer_config
from trainer.cli import build
from trainer.publish.publisher import Publisher

STEPS = 10
"""As many as the undisturbed run has."""


@pytest.fixture
async def neighbours(tmp_path: Path) -> AsyncIterator[Neighbours]:
    """A ledger, a weight store and a scheduler."""
    around = Neighbours(tmp_path / "weights")
    async with around.serving():
        yield around


class Crash(Exception):  # noqa: N818 -- names the event
    """Ends a trainer in this process."""


async def crashed_and_resumed(
    folder: Path,
    model: Path,
    neighbours: Neighbours,
    monkeypatch: pytest.MonkeyPatch,
    *,
    forgets: bool = False,
    **changed: Any,
) -> None:
    """Steps 1 to 6 with checkpoints of 3 and 6, a crash once 5 is published, then all of them.

    Args:
        folder: of the run.
        model: to train.
        neighbours: its services.
        monkeypatch: of the test.
        forgets: the ledger forgets which samples the steps since the checkpoint had.
        changed: settings of the second trainer.
    """
    values = {**JOB_CONFIG, "checkpoint__every": 3, "num_steps": 6}
    finish = Publisher.finish
    hold_back(neighbours)

    async def dying(publisher: Publisher, *given: Any, **named: Any) -> None:
        await finish(publisher, *given, **named)
        if neighbours.weights.manifests[-1].step == 5:
            raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(Publisher, "finish", dying)
        with pytest.raises(Crash):
            await _train(folder, model, neighbours, **values)
    neighbours.ledger.ready.set()
    if forgets:
        neighbours.ledger.forget_composition()
    await _train(folder, model, neighbours, **{**values, **changed})


def hold_back(neighbours: Neighbours) -> None:
    """Let step 6, and its checkpoint, wait for the death of the first trainer."""
    ledger = neighbours.ledger

    def leased(step: int) -> None:
        if step == 5 and ledger.epoch == 1:
            ledger.ready.clear()

    ledger.on_lease = leased


async def _train(folder: Path, model: Path, neighbours: Neighbours, **values: Any) -> None:
    config = trainer_config(
        run_id="r",
        model=model,
        checkpoint__folder=folder / "checkpoints",
        tracking__metrics_file=folder / "metrics.jsonl",
        trajectory_manager=neighbours.address,
        weights=neighbours.address,
        resume=True,
        **values,
    )
    service: Service
    async with build(config) as service:
        await service.background[0]()


def versions(neighbours: Neighbours) -> list[tuple[int, int]]:
    """Version and step of all that was published."""
    return [(m.weight_version, m.step) for m in neighbours.weights.manifests]


def contents(neighbours: Neighbours) -> dict[int, set[str]]:
    """By step: the checksums of the weights that were published for it."""
    found: dict[int, set[str]] = {}
    for manifest in neighbours.weights.manifests:
        digests = [f.sha256 for f in manifest.files if f.name == "model.safetensors"]
        found.setdefault(manifest.step, set()).update(digests)
    return found


@pytest.mark.long(short="tests/system/trainer/checkpoint/test_repeated_steps.py")
async def test_a_killed_trainer_repeats_the_steps_since_its_checkpoint(
    tmp_path: Path, model: Path, neighbours: Neighbours, straight_run: Path
) -> None:
    """SIGKILL at the publish of step 5, after the checkpoint of step 3: all is as without it.

    The same samples in each step, none twice, bit-equal weights, and each step published once.
    """
    child, ledger = Child(tmp_path, model, neighbours), neighbours.ledger

    def kill_once(step: int) -> None:
        if step == 5 and ledger.epoch == 1:
            os.kill(child.process.pid, signal.SIGKILL)

    hold_back(neighbours)
    neighbours.weights.on_commit = kill_once
    flags = ("--num-steps", str(STEPS), "--checkpoint.every", "3")
    await child.start(*flags)
    code, output = await child.finish()
    assert code == -signal.SIGKILL, output
    assert ledger.committed == 3
    ledger.ready.set()
    before, bases = dict(ledger.leased), dict(ledger.bases)

    await child.start(*flags, "--resume")
    code, output = await child.finish()
    assert code == 0, output
    assert ledger.committed == STEPS
    assert {step: ledger.leased[step] for step in before} == before
    records = steps_with_samples(child.metrics_file)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    trained = [name for record in records for name in record["sample_ids"]]
    assert trained == [name for step in range(1, STEPS + 1) for name in ledger.leased[step]]
    assert len(set(trained)) == len(trained)
    assert all(records[step - 1]["base_weight_version"] == bases[step] for step in bases)
    assert [step for _, step in versions(neighbours)] == list(range(1, STEPS + 1))
    newest = neighbours.weights.manifests[-1]
    published = load_file(neighbours.weights.folder(newest.weight_version) / "model.safetensors")
    straight = load_file(straight_run / "weights.safetensors")
    assert all(published[name].equal(straight[name]) for name in straight)


async def test_what_is_published_is_not_published_again(
    tmp_path: Path, model: Path, neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 5 gives the weights of version 5 again, and step 6 continues from there."""
    await crashed_and_resumed(tmp_path, model, neighbours, monkeypatch)
    assert [step for _, step in versions(neighbours)] == [1, 2, 3, 4, 5, 6]
    assert neighbours.ledger.bases[6] == 5


@pytest.mark.long(short="tests/system/trainer/checkpoint/test_repeated_steps.py")
async def test_a_ledger_that_forgets_the_steps_is_noticed(
    tmp_path: Path, model: Path, neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: other samples give other weights, which get a number of their own."""
    await crashed_and_resumed(tmp_path, model, neighbours, monkeypatch, forgets=True)
    assert [step for _, step in versions(neighbours)] == [1, 2, 3, 4, 5, 3, 4, 5, 6]
    assert len(contents(neighbours)[3]) == 1, "went back to the checkpoint"
    assert len(contents(neighbours)[5]) == 2
    numbers = [version for version, _ in versions(neighbours)]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.long(short="tests/system/trainer/checkpoint/test_repeated_steps.py")
async def test_steps_that_come_out_otherwise_are_published_under_a_new_number(
    tmp_path: Path, model: Path, neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a change of the learning rate; what servers had of step 5 stays what it was."""
    await crashed_and_resumed(
        tmp_path, model, neighbours, monkeypatch, optimizer__learning_rate=1e-3
    )
    assert [step for _, step in versions(neighbours)] == [1, 2, 3, 4, 5, 5, 6]
    assert len(contents(neighbours)[5]) == 2
    numbers = [version for version, _ in versions(neighbours)]
    assert numbers == sorted(set(numbers))
