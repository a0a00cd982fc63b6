"""Training on groups as they come: a real trainer, the real trajectory manager, a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from services.chassis.errors import ConfigError
from tests.lib.trainer.support import ROUNDING, make_samples, trainer_config
from tests.lib.trainer.training import Training, groups, other_run
from trainer.algorithms.base import make_algorithm
from trainer.clients import sample_client
from trainer.clients.sample_client import BatchProgress
from trainer.commands import Accumulate
from trainer.config import TrainerConfig
from trainer.data.gradient_chunks import GradientChunk, GroupChunker
from trainer.data.token_sequence import sequence
from trainer.leasing import batch_source
from trainer.ranks.rank_group import RankGroup

STREAMED: dict[str, Any] = {"batch__stream_groups": 1, "batch__micro_batch_tokens": 8}
"""A group of two rollouts has 12 tokens to compute: each is a part."""

AT_TAIL: dict[str, Any] = {"batch__start_at_tail": True, "scheduler": "127.0.0.1:1"}


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Trainable tokens of each part that is computed."""
    computed: list[int] = []
    real = RankGroup.do_each

    async def written(self: RankGroup, commands: Any) -> Any:
        answers = await real(self, commands)
        if isinstance(commands[0], Accumulate):
            computed.append(commands[0].num_tokens)
        return answers

    monkeypatch.setattr(RankGroup, "do_each", written)
    return computed


@asynccontextmanager
async def going_on(training: Training, num_steps: int, **values: Any) -> AsyncIterator[list[Any]]:
    """Run a trainer concurrently with the block; its records, after the block."""
    records: list[Any] = []
    task = asyncio.create_task(training.train(num_steps, **values))
    try:
        yield records
        records += await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(parts: list[int], number: int) -> None:
    """Wait until this number of chunks is computed."""
    async with asyncio.timeout(60):
        while len(parts) < number:
            await asyncio.sleep(0.01)


async def test_a_step_begins_with_its_first_group(training: Training, parts: list[int]) -> None:
    """Each group is computed while agents play the next; the step ends with the last one."""
    await training.begin("a", "b", "c")
    async with going_on(training, 1, **STREAMED) as records:
        for number in (1, 2):
            await training.play(2)
            await until(parts, number)
            counts = await training.readiness()
            assert (counts.leased_step, counts.committed_step) == (1, 0)
            assert counts.num_ready_groups == 0, "the open step has them"
        await training.play(2)
    (record,) = records
    assert groups(record) == ["a/0", "a/1", "b/0", "b/1", "c/0", "c/1"]
    assert parts == [6, 6, 6, 0], "the last part closes the step"
    assert record["num_tokens"] == sum(parts)
    assert set((await training.committed_steps()).values()) == {1}


async def test_without_streaming_a_step_begins_with_its_last_group(
    training: Training, parts: list[int]
) -> None:
    """Negative control: the same agents, and all is one part."""
    await training.begin("a", "b", "c")
    async with going_on(training, 1, batch__micro_batch_tokens=8):
        await training.play(4)
        await asyncio.sleep(0.3)
        assert not parts
        await training.play(2)
    assert parts == [18]


async def test_a_streamed_step_is_the_step_of_its_batch(training: Training, tmp_path: Path) -> None:
    """To rounding, in float64, over three steps."""
    names = [f"t{number}" for number in range(9)]
    whole = other_run(training, tmp_path / "whole")
    for run, values in ((training, STREAMED), (whole, {"batch__micro_batch_tokens": 8})):
        await run.begin(*names, max_staleness=3)
        await run.play(18)
        await run.train(3, dtype="float64", **values)
    other = whole.weights()
    differences = [float((t - other[name]).abs().max()) for name, t in training.weights().items()]
    assert max(differences) < ROUNDING


async def test_a_step_interrupted_by_a_crash_has_the_same_chunks(
    training: Training, parts: list[int], tmp_path: Path
) -> None:
    """The next trainer gets what was leased, then what comes: the weights are equal bit for bit."""
    await training.begin("a", "b", "c")
    await training.play(4)
    crashed = training.samples()
    await crashed.reconcile(0)
    page = await crashed.lease_page(1, 0, 0)
    assert page is not None
    assert len(page.samples) == page.next_sample == 4
    await training.play(2)
    (record,) = await training.train(1, **STREAMED)
    assert groups(record)[:4] == ["a/0", "a/1", "b/0", "b/1"]
    undisturbed = other_run(training, tmp_path / "undisturbed")
    await undisturbed.begin("a", "b", "c")
    await undisturbed.play(6)
    await undisturbed.train(1, **STREAMED)
    assert parts[:4] == parts[4:]
    published = undisturbed.weights()
    assert all(tensor.equal(published[name]) for name, tensor in training.weights().items())


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_repeated_step_is_cut_as_before(
    training: Training, parts: list[int], streamed: bool
) -> None:
    """However its trainer would begin a step now; the base version is that of its first lease."""
    await training.begin("a", "b", "c", max_staleness=7)
    await training.play(6)
    crashed = training.samples()
    await crashed.reconcile(0)
    await (crashed.lease_page(1, 7, 0) if streamed else crashed.lease(1, 7))
    now = {"batch__micro_batch_tokens": 8} if streamed else STREAMED
    (record,) = await training.train(1, **now)
    assert parts == ([6, 6, 6, 0] if streamed else [18])
    assert record["base_weight_version"] == 7


async def test_a_timeout_closes_an_open_step(
    training: Training, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the groups it has, once these are enough."""
    now = [0.0]
    monkeypatch.setattr(batch_source, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(sample_client, "_LEASE_POLL_SECONDS", 0.05)
    values = {"batch__timeout_seconds": 100.0, "batch__min_groups": 2, **STREAMED}
    await training.begin("a", "b", "c")
    async with going_on(training, 1, **values) as records:
        await training.play(2)
        await until(parts, 1)
        now[0] = 101.0
        await asyncio.sleep(0.2)
        assert (await training.readiness()).num_open_groups == 1, "two are the least"
        await training.play(2)
    assert groups(records[0]) == ["a/0", "a/1", "b/0", "b/1"]


async def test_pages_cut_no_group(
    training: Training, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sample is a separate page, and the timeout is over from the start."""
    monkeypatch.setattr(sample_client, "_PAGE_BYTES", 1)
    values = {"batch__timeout_seconds": 1e-9, "batch__min_groups": 3, **STREAMED}
    await training.begin("a", "b", "c", "d")
    await training.play(6)
    (record,) = await training.train(1, **values)
    assert parts == [6, 6, 6, 0]
    assert len(record["sample_ids"]) == 6


async def test_an_open_step_is_no_batch_for_a_trainer_that_waits_for_all(
    training: Training,
) -> None:
    """After a restart without streaming the step is waited for like any other, by its timeout."""
    await training.begin("a", "b", "c")
    await training.play(2)
    crashed = training.samples()
    await crashed.reconcile(0)
    assert await crashed.lease_page(1, 0, 0) is not None
    again = training.samples()
    await again.reconcile(0)
    assert await again.progress(1, 0) == BatchProgress(1, 3)
    (first,) = await training.train(1, batch__timeout_seconds=1e-9)
    assert groups(first) == ["a/0", "a/1"]


def pages(seed: int, num_sequences: int) -> list[int]:
    """Where pages end, at random."""
    dice = np.random.default_rng(seed)
    return sorted({*dice.integers(0, num_sequences, 4).tolist(), num_sequences})


@pytest.mark.parametrize("seed", range(10))
def test_parts_depend_on_the_order_of_groups_alone(seed: int) -> None:
    """However pages cut them, and wherever a page ended with nothing behind it."""
    sequences = [sequence(sample) for sample in make_samples(seed, groups=6, group_size=3)]
    whole = list(GroupChunker(80).push(sequences, group_complete=True, last=True))
    rounds, found, begin = GroupChunker(80), list[GradientChunk](), 0
    for end in pages(seed, len(sequences)):
        last = end == len(sequences)
        found += rounds.push(sequences[begin:end], group_complete=False, last=last)
        if end % 3 == 0 and not last:
            found += rounds.push([], group_complete=True, last=False)
        begin = end
    assert [[item.sample_id for item in part.sequences] for part in found] == [
        [item.sample_id for item in part.sequences] for part in whole
    ]
    assert [part.last for part in found] == [part.last for part in whole]
    for part in found[:-1]:
        tokens = [len(item.token_ids_T) for item in part.sequences]
        assert sum(tokens) >= 80 > sum(tokens[:-3]), "no longer than it must be"


def test_an_algorithm_that_compares_a_whole_step_cannot_be_streamed(tmp_path: Path) -> None:
    """The message names the setting, the value and the cure."""

    def config(algorithm: str, **values: Any) -> TrainerConfig:
        return trainer_config(
            run_id="r",
            model=tmp_path,
            checkpoint__folder=tmp_path,
            algorithm__name=algorithm,
            **values,
        )

    for values, message in (
        ({"batch__stream_groups": 2}, r"stream_groups is 2: reinforce_pp .* set it to 0"),
        (AT_TAIL, r"start_at_tail is True: reinforce_pp compares .* set it to False"),
    ):
        make_algorithm(config("rloo", **values))
        with pytest.raises(ConfigError, match=message):
            make_algorithm(config("reinforce_pp", **values))


def test_only_a_scheduler_knows_when_the_tail_begins(tmp_path: Path) -> None:
    """Without one the setting is refused."""
    given = {"run_id": "r", "model": tmp_path, "checkpoint__folder": tmp_path}
    with pytest.raises(ValueError, match=r"start_at_tail is true but scheduler is not set"):
        trainer_config(**given, batch__start_at_tail=True)
