"""Checkpoints while training goes on.

COPIED (to the host; training waits for no more) -> DURABLE -> COMMITTED (its samples are)
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from trainer.background import Beside
from trainer.checkpoint import checkpoint_files
from trainer.clients import Samples
from trainer.config import TrainerConfig
from trainer.device_lease import GangThread
from trainer.tracking.step_record import StepRecord

__all__ = ["Checkpointing"]


class Checkpointing:
    """Writes one checkpoint after the other, and commits the samples that each covers."""

    def __init__(self, config: TrainerConfig, gang: GangThread, samples: Samples) -> None:
        """Nothing is under way."""
        self._config = config
        self._gang, self._samples = gang, samples
        self._base = config.base()
        self.writing, self.committing = Beside(), Beside()
        self.step = 0
        """Newest step with a durable checkpoint; 0: none."""
        self.begun_step = 0
        """That, or the one under way."""
        self._committed_step = 0

    def resumed(self, step: int) -> None:
        """A checkpoint of `step` was there at the start."""
        self.step = self.begun_step = self._committed_step = step

    async def begin(self, record: StepRecord, weight_version: int) -> None:
        """Copy what the finished step of `record` left, once the one before is durable.

        Raises what that one failed with.
        """
        with record.phase("checkpoint"):
            await self.writing.end()
            partial = checkpoint_files.begin(self._config.checkpoint_folder, record.step)
            await self._gang.save(partial)
        state = checkpoint_files.Checkpoint(
            run_id=self._config.run_id,
            step=record.step,
            weight_version=weight_version,
            world_size=self._gang.world_size,
            mathematics=self._config.mathematics(),
            base=self._base,
            record=record.line(),
        )
        self.begun_step = record.step
        self.writing.begin(self._write(partial, state))

    async def end(self) -> None:
        """Wait until nothing is under way. Raises what it failed with."""
        await self.writing.end()
        await self.committing.end()

    async def committed(self, step: int) -> None:
        """Wait until a durable checkpoint covers `step` and its samples are committed.

        Not for checkpoints of later steps. Raises what failed.
        """
        while self._committed_step < step:
            for work in (self.writing, self.committing):
                work.raise_if_failed()
            living = self.writing.living | self.committing.living
            if not living:
                return
            await asyncio.wait(living, return_when=asyncio.FIRST_COMPLETED)

    async def _write(self, partial: Path, state: checkpoint_files.Checkpoint) -> None:
        await self._gang.written(partial)
        keep = self._config.keep_checkpoints
        await asyncio.to_thread(checkpoint_files.complete, partial, state, keep)
        self.step = state.step
        # Apart, or an outage of the manager would hold up the next checkpoint.
        if not self.committing.living:
            await self.committing.end()
            self.committing.begin(self._commit())

    async def _commit(self) -> None:
        """Never before it is durable: what is committed is never leased again."""
        while self._committed_step < self.step:
            step = self.step
            await self._samples.commit(step)
            self._committed_step = step
