"""The training loop, on rank 0.

STARTING -> WAITING -> TRAINING -> WAITING ... -> FINISHED; SUSPENDED while the devices are lent.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from services.chassis import metrics
from services.chassis.log import get_logger
from services.chassis.rpc import tracing
from trainer.background.async_checkpointer import AsyncCheckpointer
from trainer.background.async_publisher import AsyncPublisher
from trainer.background.background_task import run_with_background
from trainer.background.sample_recorder import SampleRecorder
from trainer.checkpoint.resume import changed_settings, take_over
from trainer.clients.node_client import NodeClient
from trainer.clients.sample_client import SampleClient
from trainer.config import TrainerConfig
from trainer.leasing.accepted_samples import AcceptedSamples
from trainer.leasing.batch_source import BatchSource
from trainer.publish.publisher import Publisher
from trainer.publish.snapshot_weights import SnapshotWeights
from trainer.ranks.device_lease import DeviceLease
from trainer.ranks.rank_group import RankGroup
from trainer.step.batch_trial import Trial
from trainer.step.replica_count import ReplicaCount
from trainer.step.step_runner import Progress, StepRunner
from trainer.tracking.step_record import MetricsFile, StepRecord
from trainer.tracking.tracker import Alarms, SampleTable, Trackers

_FINISHED = metrics.gauge("trainer", "finished", "1 after the last optimizer step, else 0.")


class Trainer:
    """Trains step by step; checkpoints and publishes of earlier steps run in the background."""

    def __init__(
        self,
        config: TrainerConfig,
        ranks: RankGroup,
        device: DeviceLease,
        samples: SampleClient,
        nodes: NodeClient,
        publisher: Publisher,
        trackers: Trackers,
        alarms: Alarms,
    ) -> None:
        self._config = config
        self._device, self._samples, self._nodes = device, samples, nodes
        self.alarms = alarms
        self.replicas = ReplicaCount(ranks, device, nodes)
        """How many copies of the models train."""
        backend = ranks.rank0.worker.backend
        self._accepted = AcceptedSamples(
            config,
            samples,
            self.alarms,
            backend.vocabulary_size,
            backend.routing,
        )
        self._batches = BatchSource(config, samples, nodes, self._accepted, ranks.rank0.world_size)
        self._steps = StepRunner(config, ranks)
        self._trial = Trial(config, samples, self._accepted, self._steps)
        self._checkpointer = AsyncCheckpointer(config, ranks, samples)
        self._publisher = AsyncPublisher(config, publisher, samples, self._snapshot)
        self._metrics = MetricsFile(config.tracking.metrics_file)
        self._recorder = SampleRecorder(config, ranks, samples)
        self._trackers = trackers
        self._sample_table = SampleTable(config, trackers)

    @property
    def progress(self) -> Progress:
        return self._steps.progress

    @property
    def weight_version(self) -> int:
        """Newest version published; 0: the model the run started from."""
        return self._publisher.weight_version

    @property
    def checkpoint_step(self) -> int:
        """Newest step with a durable checkpoint; 0 for none."""
        return self._checkpointer.step

    async def run(self) -> None:
        """Train; a checkpoint or publish that fails aborts training."""
        background = *self._checkpointer.tasks, self._publisher.task
        await run_with_background(self.train(), *background)

    async def train(self) -> None:
        """Resume, then train up to the last step: batch, gradient, update, checkpoint, publish."""
        named = await self._samples.check_rules(self._config.algorithm, self._config.batch)
        self._accepted.named_rewards = named
        await self._resume()
        while self.progress.step < self.progress.last_step:
            await self.replicas.follow(self._settle)
            await self._try_groups(self.progress.step + 1)
            record = StepRecord(self.progress.step + 1, self._publisher.started_version)
            with tracing.span("step", run_id=self._config.run_id, step=record.step):
                await self._step(record)
            self._report(record)
        await self.save_checkpoint()  # unless it is there
        await self._recorder.finish()
        self.progress.finished = True
        _FINISHED.set(1)
        await self._nodes.release()
        if self._config.end_run:
            await self._samples.end_run()

    async def _try_groups(self, step: int) -> None:
        """Before the step at which trainers ended, with the weights that it begins with."""
        if step == self._samples.newest_pending and await self._trial.is_due():
            async with self._device.use(self._nodes.acquire):
                await self._trial.run()

    async def _step(self, record: StepRecord) -> None:
        async for chunk in self._batches.chunks(record):
            async with self._device.use(self._nodes.acquire):
                await self._steps.accumulate(chunk, record)
                if chunk.last:
                    await self._optimize(record)
                    await self._steps.on_those_left(
                        lambda: self._checkpointer.save_if_due(
                            record, self.weight_version, last=self._is_last(record)
                        )
                    )
        await self._publisher.publish_if_due(record, last=self._is_last(record))

    async def _optimize(self, record: StepRecord) -> None:
        """Update the weights, and begin to record what the step trained on."""
        records = self._recorder.is_ready
        await self._steps.optimize(record, sends_rows=records)
        sequences = record.take_sequences()
        if records:
            self._recorder.start(record.step, record.base_weight_version, sequences)

    def finish(self) -> int:
        """Make the step in progress the last one; returns its number."""
        progress = self.progress
        progress.last_step = min(progress.last_step, progress.step + 1)
        return progress.last_step

    def track_evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        """Show the result of an evaluation of the weights of `step` in the trackers."""
        self._trackers.log_evaluation(step, numbers)

    async def drain(self) -> None:
        """Wait until the checkpoint in flight is durable and its samples are committed.

        Raises nothing: `run` raises the error of a checkpoint that fails.
        """
        with suppress(Exception):
            await self._checkpointer.wait()

    async def save_checkpoint(self) -> int:
        """Checkpoint the newest finished step, unless it has a checkpoint; its number."""
        await self._checkpointer.wait()
        step = self.progress.step
        while self.checkpoint_step < step:  # again if a rank is lost before its shard is durable
            async with self._device.use(self._nodes.acquire):
                # Another step may have finished by now. Between the chunks of a step the weights
                # are still those of the step before.
                record = self._without_checkpoint()
                if record is not None:
                    start = partial(self._checkpointer.start, record, self.weight_version)
                    await self._steps.on_those_left(start)
            await self._batches.release_if_lent()
            await self._checkpointer.wait()
        return self.checkpoint_step

    async def checkpoint_written(self, step: int) -> None:
        """Wait until the checkpoint of `step` is durable or has failed, if it is in flight."""
        await self._checkpointer.wait_for(step)

    def _without_checkpoint(self) -> StepRecord | None:
        """The record of the newest finished step, if that step has no checkpoint."""
        has_checkpoint = self._checkpointer.started_step == self.progress.step
        return None if has_checkpoint else self.progress.record

    def _is_last(self, record: StepRecord) -> bool:
        return record.step == self.progress.last_step

    async def _resume(self) -> None:
        """Take over the run, load its newest checkpoint and publish weights lost in a crash."""
        found = await take_over(self._config, self._samples, self.alarms)
        if found is not None:
            folder, checkpoint = found
            self.progress.step = checkpoint.step
            self._checkpointer.resume(checkpoint.step)
            changed = changed_settings(checkpoint, self._config)
            get_logger().info("resumed", step=checkpoint.step, changed=changed)
            if changed:
                self.alarms.add(f"it resumed with other settings: {', '.join(changed)}")
            async with self._device.use(self._nodes.acquire):
                await self._steps.load(folder)
        self._metrics.begin(self.progress.step, found[1].record if found else {})
        self._sample_table.begin(self.progress.step)
        await self._publisher.recover(self.progress.step)
        if self._config.scheduler is not None:
            # The scheduler assigns the nodes; their agents resume the trainer.
            await self._device.start_suspended()

    async def _settle(self) -> None:
        """Wait until neither a checkpoint nor a publish reads the state of the ranks."""
        await self._checkpointer.wait()
        await self._publisher.supersede()

    async def _snapshot(self) -> SnapshotWeights:
        async with self._device.use(self._nodes.acquire):
            return await self._steps.snapshot()

    def _report(self, record: StepRecord) -> None:
        """Write the record of a finished step to metrics file, Prometheus, trackers and log."""
        record.published(self._publisher.started_version)
        self.progress.training = False
        self._metrics.append(record)
        record.observe()
        numbers = {**record.numbers(), "step": record.step}
        self._trackers.log(record.step, numbers)
        self._sample_table.add(record)
        get_logger().info("step", **numbers)
