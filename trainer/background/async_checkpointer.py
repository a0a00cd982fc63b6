"""Write checkpoints in the background of training, then commit the samples they cover.

COPIED (to the host; training continues) -> DURABLE -> COMMITTED (samples)
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from services.chassis.log import get_logger
from trainer.background.background_task import BackgroundTask
from trainer.checkpoint import checkpoint_files
from trainer.clients.sample_client import SampleClient
from trainer.config import TrainerConfig
from trainer.object_path import Folder
from trainer.ranks.rank_group import RankGroup, RankLostError
from trainer.tracking.step_record import StepRecord


class AsyncCheckpointer:
    """Writes one checkpoint after another, and commits the samples that each covers."""

    def __init__(self, config: TrainerConfig, ranks: RankGroup, samples: SampleClient) -> None:
        self._config = config
        self._ranks, self._samples = ranks, samples
        self._base = config.base()
        self._writing, self._committing = BackgroundTask(), BackgroundTask()
        self.tasks = (self._writing, self._committing)
        self.step = 0
        """Newest step with a durable checkpoint; 0 for none."""
        self.started_step = 0
        """The step whose checkpoint is in flight, or else `step`."""
        self._committed_step = 0

    def resume(self, step: int) -> None:
        """Continue after a durable checkpoint of `step`."""
        self.step = self.started_step = self._committed_step = step

    async def save_if_due(
        self, record: StepRecord, weight_version: int, *, last: bool = False
    ) -> None:
        """Start a checkpoint of the finished step of `record` if it is due; the last one is."""
        if last or record.step % self._config.checkpoint.every == 0:
            await self.start(record, weight_version)

    async def start(self, record: StepRecord, weight_version: int) -> None:
        """Copy the state after the finished step of `record` once the last checkpoint is durable.

        Raises the error of the last checkpoint.
        """
        with record.phase("checkpoint"):
            await self._writing.wait()
            place = self._config.checkpoint.place
            partial = await asyncio.to_thread(checkpoint_files.begin, place, record.step)
            await self._ranks.save(partial)
        checkpoint = checkpoint_files.Checkpoint(
            run_id=self._config.run_id,
            step=record.step,
            weight_version=weight_version,
            world_size=self._ranks.rank0.world_size,
            settings=self._config.reproducibility_settings(),
            base=self._base,
            model=str(self._config.model.resolve()),
            record=record.line() | record.samples(),
        )
        self.started_step = record.step
        self._writing.start(self._write(partial, checkpoint))

    async def wait(self) -> None:
        """Wait until no checkpoint is in flight and all samples are committed. Raises errors."""
        await self._writing.wait()
        await self._committing.wait()

    async def wait_for(self, step: int) -> None:
        """Wait until the checkpoint of `step` is durable or has failed, if it is in flight."""
        if self.started_step == step:
            with suppress(Exception):  # `wait` raises it
                await self._writing.wait()

    async def _write(self, partial: Folder, checkpoint: checkpoint_files.Checkpoint) -> None:
        try:
            await self._ranks.wait_written(partial)
        except RankLostError as error:
            # The next one covers its step too.
            get_logger().warning("checkpoint_dropped", step=checkpoint.step, error=str(error))
            self.started_step = self.step
            return
        keep = self._config.checkpoint.keep
        await asyncio.to_thread(checkpoint_files.complete, partial, checkpoint, keep)
        self.step = checkpoint.step
        # A separate task: an outage of the manager must not delay the next checkpoint.
        if not self._committing.running:
            await self._committing.wait()
            self._committing.start(self._commit())

    async def _commit(self) -> None:
        """Commit after the checkpoint is durable: committed samples are never leased again."""
        while self._committed_step < self.step:
            step = self.step
            await self._samples.commit(step)
            self._committed_step = step
