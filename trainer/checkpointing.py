"""Checkpoints while training goes on.

COPIED (to the host; training waits for no more) -> DURABLE -> COMMITTED (its samples are)
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from trainer import checkpoint
from trainer.beside import Beside
from trainer.commands import Save
from trainer.config import TrainerConfig
from trainer.device import GangThread
from trainer.peers import Samples
from trainer.record import StepRecord

__all__ = ["Checkpointing"]


class Checkpointing:
    """Writes one checkpoint after the other, and commits the samples that each covers."""

    def __init__(self, config: TrainerConfig, gang: GangThread, samples: Samples) -> None:
        """Nothing is under way."""
        self._config = config
        self._gang, self._samples = gang, samples
        self.work = Beside()
        self.step = 0
        """Newest step with a durable checkpoint; 0: none."""
        self.begun_step = 0
        """That, or the one under way."""

    async def begin(self, record: StepRecord, weight_version: int) -> None:
        """Copy what the finished step of `record` left; once the one before is done.

        Raises what that one ended with.
        """
        with record.phase("checkpoint"):
            await self.end()
            partial = checkpoint.begin(self._config.checkpoint_folder, record.step)
            await self._gang.do(Save(folder=str(partial)))
        state = checkpoint.Checkpoint(
            run_id=self._config.run_id,
            step=record.step,
            weight_version=weight_version,
            world_size=self._gang.world_size,
            mathematics=self._config.mathematics(),
            record=record.line(),
        )
        self.begun_step = record.step
        self.work.begin(self._finish(partial, state))

    async def end(self) -> None:
        """Wait until nothing is under way. Raises what it ended with."""
        await self.work.end()

    async def _finish(self, partial: Path, state: checkpoint.Checkpoint) -> None:
        await self._gang.written()
        keep = self._config.keep_checkpoints
        await asyncio.to_thread(checkpoint.complete, partial, state, keep)
        self.step = state.step
        # Never before it is durable: what is committed is never leased again.
        await self._samples.commit(state.step)
