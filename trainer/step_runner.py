"""One optimizer step on all ranks: accumulate gradients chunk by chunk, then update."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from trainer.checkpoint.step_dump import StepDumpWriter
from trainer.config import TrainerConfig
from trainer.data.gradient_chunks import GradientChunk
from trainer.data.token_sequence import TokenSequence
from trainer.policy.commands import Accumulate, Discard, Gather, Load, Optimize
from trainer.rank_group import RankGroup
from trainer.ranks.chunk_commands import ChunkCommands
from trainer.tracking.step_record import StepRecord

__all__ = ["Progress", "StepRunner"]

_EPOCHS, _MINI_BATCHES = 1 << 40, 1 << 41
"""Third part of the seeds of both shuffles; other seeds have a sample's number there."""
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


class StepRunner:
    """Runs the optimizer steps of a run on its ranks, whose devices the caller holds."""

    def __init__(self, config: TrainerConfig, ranks: RankGroup) -> None:
        self.progress = Progress(last_step=config.num_steps)
        self._config = config
        self._ranks = ranks
        self._chunk_commands: ChunkCommands | None = None
        self._dump = StepDumpWriter(config)
        self._updates: list[Mapping[str, float]] = []  # metrics of those of the step

    async def load(self, folder: Path) -> None:
        """Load the state of the checkpoint in `folder`."""
        await self._ranks.do(Load(folder=str(folder)))

    async def accumulate(self, chunk: GradientChunk, record: StepRecord) -> None:
        """Add the gradient of a chunk to that of the step."""
        self.progress.training = True
        if self._config.algorithm.several_updates:
            await self._update_often(chunk, record)
            return
        commands = await self._commands(chunk, record)
        if record.num_samples == 0 and (folder := self._dump.start(record.step)):
            await self._ranks.save(folder)
            await self._ranks.wait_written(folder)
        self._dump.add_chunk(record.step, commands)
        with record.phase("train"):
            self._chunks.report(await self._ranks.do_each(commands))
        record.add(chunk.sequences)
        self.progress.training = chunk.last

    async def try_group(self, step: int, sequences: Sequence[TokenSequence]) -> str:
        """Compute the gradient of one group and forget it; what of it is not finite, if anything.

        Raises what an algorithm or model raises on the group.
        """
        chunk, record = GradientChunk(sequences=sequences, last=True), StepRecord(step, 0)
        await self._ranks.do_each(await self._commands(chunk, record))
        found = (await self._ranks.do(Discard()))[0]
        bad = [
            f"{name} is {found[name]}"
            for name in _FINITE
            if not math.isfinite(found.get(name, 0.0))
        ]
        return ", ".join(bad)

    async def optimize(self, record: StepRecord) -> None:
        """Update the weights with the gradient of the step."""
        with record.phase("train"):
            await self._optimize(record)
        metrics, self._updates = _means(self._updates), []
        self._dump.finish(record.step, self._ranks.world_size, metrics)
        reward = self._config.algorithm.trained_reward
        record.result(metrics, reward, self._config.tracking.num_samples)
        self.progress.step = record.step
        self.progress.record = record

    async def _update_often(self, chunk: GradientChunk, record: StepRecord) -> None:
        """All updates of a step but the last, whose gradient is left; `chunk` is the whole step."""
        with record.phase("train"):
            parts = await self._mini_batches(chunk, record)
            for commands in parts:
                await self._ranks.do_each(self._chunks.predictions(commands))
            *numbers, last = self._update_order(record.step, len(parts))
            for number in numbers:
                self._chunks.report(await self._ranks.do_each(parts[number]))
                await self._optimize(record)
            await self._ranks.do_each(parts[last])
        record.add(chunk.sequences)
        self.progress.training = chunk.last

    async def _optimize(self, record: StepRecord) -> None:
        self._updates.append((await self._ranks.do(Optimize(step=record.step)))[0])

    def _update_order(self, step: int, num_mini_batches: int) -> list[int]:
        """Numbers of mini-batches, in another order in each epoch."""
        rng = np.random.default_rng([self._config.seed, step, _EPOCHS])
        epochs = range(self._config.algorithm.num_epochs)
        return [int(each) for _ in epochs for each in rng.permutation(num_mini_batches)]

    async def gather(self) -> Mapping[str, torch.Tensor]:
        """The whole weights, on the host."""
        await self._ranks.do(Gather())
        return self._ranks.take_gathered()

    async def _commands(self, chunk: GradientChunk, record: StepRecord) -> list[Accumulate]:
        """One command for each rank. In a thread: a pipeline is planned for seconds."""
        return await asyncio.to_thread(
            self._chunks.of, chunk.sequences, record.base_weight_version, self._shuffle(record)
        )

    async def _mini_batches(
        self, chunk: GradientChunk, record: StepRecord
    ) -> list[list[Accumulate]]:
        """The same of each mini-batch, which depend on seed and step alone."""
        return await asyncio.to_thread(
            self._chunks.mini_batches,
            chunk.sequences,
            record.base_weight_version,
            np.random.default_rng([self._config.seed, record.step, _MINI_BATCHES]),
            self._shuffle(record),
        )

    def _shuffle(self, record: StepRecord) -> np.random.Generator | None:
        if not self._config.algorithm.shuffle_rewards:
            return None
        return np.random.default_rng([self._config.seed, record.step, record.num_samples])

    @property
    def _chunks(self) -> ChunkCommands:
        """Made when the ranks have started."""
        if self._chunk_commands is None:
            ranks = self._ranks
            self._chunk_commands = ChunkCommands(
                self._config, ranks.world_size, packed=ranks.packed
            )
        return self._chunk_commands


def _means(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of the metrics of a step's updates; of one, these themselves."""
    names = dict.fromkeys(name for update in updates for name in update)
    found = {name: [update[name] for update in updates if name in update] for name in names}
    return {name: v[0] if len(v) == 1 else fmean(v) for name, v in found.items()}
