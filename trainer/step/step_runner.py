"""One optimizer step on all ranks: accumulate gradients chunk by chunk, then update."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, TypeVar

import numpy as np

from services.chassis.log import get_logger
from services.lib.group_baseline import compares_groups
from trainer.commands import Accumulate, Discard, Load, Measure, Optimize
from trainer.config import TrainerConfig
from trainer.data.gradient_chunks import GradientChunk
from trainer.data.token_sequence import TokenSequence
from trainer.object_path import Folder
from trainer.pipeline.schedule import num_interleaved
from trainer.publish.snapshot_weights import SnapshotWeights
from trainer.ranks.command_channel import RankFailedError, RankLostError
from trainer.ranks.rank_group import RankGroup
from trainer.step.chunk_commands import ChunkCommands, MiniBatch
from trainer.tracking.step_record import StepRecord

_EPOCHS, _MINI_BATCHES = 1 << 40, 1 << 41
"""Third part of the seeds of both shuffles; other seeds have a sample's number there."""
T = TypeVar("T")
_FINITE = ("loss", "grad_norm", "critic_grad_norm")


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far training is."""

    step: int = 0
    """Finished optimizer steps."""
    training: bool = False
    """True while a step is computed."""
    finished: bool = False
    """True after the last step."""
    last_step: int = 0
    """The step after which training ends."""
    record: StepRecord | None = None
    """Of the last finished step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A part of a step's batch, which may be computed more than once."""

    chunk: GradientChunk
    record: StepRecord
    num_before: int
    """Samples of the step in earlier parts."""


class StepRunner:
    """Runs the optimizer steps of a run on its ranks, whose devices the caller holds."""

    def __init__(self, config: TrainerConfig, ranks: RankGroup) -> None:
        self.progress = Progress(last_step=config.num_steps)
        self._config = config
        self._ranks = ranks
        self._chunk_commands: ChunkCommands | None = None
        self._parts: list[_Part] = []  # of the step so far
        self._updates: list[Mapping[str, float]] = []  # metrics of those of the step

    async def load(self, folder: Folder) -> None:
        await self.on_those_left(lambda: self._ranks.do(Load(folder=str(folder))))

    async def on_those_left(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do `work`, and repeat it on the ranks that are left when one is lost.

        Before that they compute again what of the step's gradient was computed.

        Raises:
            RankFailedError: the others cannot go on.
        """
        while True:
            try:
                return await work()
            except RankLostError as error:
                get_logger().warning("rank_lost", step=self.progress.step + 1, error=str(error))
                await self._go_back()

    async def accumulate(self, chunk: GradientChunk, record: StepRecord) -> None:
        """Add the gradient of a chunk to that of the step."""
        self.progress.training = True
        several = self._config.algorithm.several_updates
        compute = self._update_often if several else self._add_gradient
        part = _Part(chunk=chunk, record=record, num_before=record.num_samples)
        await self.on_those_left(lambda: compute(part))
        self._parts.append(part)
        record.add(chunk.sequences)
        self.progress.training = chunk.last

    async def try_group(self, step: int, sequences: Sequence[TokenSequence]) -> str:
        """Compute the gradient of one group and forget it; what of it is not finite, if anything.

        Raises what an algorithm or model raises on the group.
        """
        chunk = GradientChunk(sequences=sequences, last=True)
        part = _Part(chunk=chunk, record=StepRecord(step, 0), num_before=0)
        found = await self.on_those_left(lambda: self._tried(part))
        bad = [
            f"{name} is {found[name]}"
            for name in _FINITE
            if not math.isfinite(found.get(name, 0.0))
        ]
        return ", ".join(bad)

    async def optimize(self, record: StepRecord, *, sends_rows: bool = False) -> None:
        """Update the weights with the gradient of the step.

        `sends_rows`: whether the ranks send what was trained on (`RankGroup.trained_rows`).
        """
        with record.phase("train"):
            await self._optimize(record, "send" if sends_rows else "drop")
        metrics, self._updates = _means(self._updates), []
        algorithm = self._config.algorithm
        record.result(
            metrics,
            algorithm.trained_reward,
            self._config.tracking.num_samples,
            compares_groups=compares_groups(algorithm.name),
        )
        self.progress.step = record.step
        self.progress.record = record
        self._parts = []
        if await self._ranks.form(join=True):
            num_ranks = self._ranks.rank0.world_size
            get_logger().info("ranks_formed", step=record.step, num_ranks=num_ranks)

    async def _go_back(self) -> None:
        """Form a group of the ranks that are left, and compute the parts of the step again."""
        if self._updates:
            raise RankFailedError(
                "a rank was lost between the updates of a step: its begin is in the checkpoint"
            )
        while True:
            with suppress(RankLostError):  # one more
                await self._ranks.form()
                for part in self._parts:
                    await self._add_gradient(part)
                return

    async def _add_gradient(self, part: _Part) -> None:
        """Of a step with one update."""
        commands = await self._commands(part)
        with part.record.phase("train"):
            self._chunks.report(await self._ranks.do_each(commands))
        part.record.interleaved(num_interleaved(each.actions for each in commands))

    async def _tried(self, part: _Part) -> dict[str, float]:
        await self._ranks.do_each(await self._commands(part))
        return (await self._ranks.do(Discard()))[0]

    async def _update_often(self, part: _Part) -> None:
        """All updates of a step but the last, whose gradient is left; `part` is the whole step."""
        record = part.record
        with record.phase("train"):
            parts = await self._mini_batches(part)
            for mini_batch in parts:
                await self._ranks.do_each(mini_batch.predict)
            *numbers, last = self._update_order(record.step, len(parts))
            for number in numbers:
                self._chunks.report(await self._ranks.do_each(parts[number].accumulate))
                await self._optimize(record, "keep")
            await self._ranks.do_each(parts[last].accumulate)

    async def _optimize(self, record: StepRecord, rows: Literal["keep", "send", "drop"]) -> None:
        if self._config.replicas > 1:
            # After it no rank needs another one to update: either all that are left do, or none.
            await self.on_those_left(lambda: self._ranks.do(Measure(step=record.step)))
        answers = await self._ranks.do(Optimize(step=record.step, rows=rows))
        self._updates.append(answers[0])

    def _update_order(self, step: int, num_mini_batches: int) -> list[int]:
        """Numbers of mini-batches, in another order in each epoch."""
        rng = np.random.default_rng([self._config.seed, step, _EPOCHS])
        epochs = range(self._config.algorithm.num_epochs)
        return [int(each) for _ in epochs for each in rng.permutation(num_mini_batches)]

    async def snapshot(self) -> SnapshotWeights:
        return await self.on_those_left(self._ranks.snapshot)

    async def _commands(self, part: _Part) -> list[Accumulate]:
        """One command for each rank. In a thread: a pipeline is planned for seconds."""
        return await asyncio.to_thread(
            self._chunks.of,
            part.chunk.sequences,
            part.record.base_weight_version,
            self._shuffle(part),
            part.num_before,
        )

    async def _mini_batches(self, part: _Part) -> list[MiniBatch]:
        """The commands of each mini-batch, which depend on seed and step alone."""
        return await asyncio.to_thread(
            self._chunks.mini_batches,
            part.chunk.sequences,
            part.record.base_weight_version,
            np.random.default_rng([self._config.seed, part.record.step, _MINI_BATCHES]),
            self._shuffle(part),
        )

    def _shuffle(self, part: _Part) -> np.random.Generator | None:
        if not self._config.algorithm.shuffle_rewards:
            return None
        return np.random.default_rng([self._config.seed, part.record.step, part.num_before])

    @property
    def _chunks(self) -> ChunkCommands:
        """For the ranks that there are now."""
        rank0, made = self._ranks.rank0, self._chunk_commands
        if made is None or made.world_size != rank0.world_size:
            packed = rank0.worker.backend.packed
            made = ChunkCommands(self._config, rank0.world_size, packed=packed)
            self._chunk_commands = made
        return made


def _means(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of the metrics of a step's updates; of one, these themselves."""
    names = dict.fromkeys(name for update in updates for name in update)
    found = {name: [update[name] for update in updates if name in update] for name in names}
    return {name: v[0] if len(v) == 1 else fmean(v) for name, v in found.items()}
