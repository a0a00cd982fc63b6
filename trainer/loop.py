"""The training loop: what a trainer does, on one screen.

STARTING -> WAITING -> TRAINING -> WAITING ... -> FINISHED; SUSPENDED whenever the device is lent.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from services.chassis.log import get_logger
from trainer.algorithms.base import make_algorithm
from trainer.background import beside
from trainer.batch_source import Batches
from trainer.checkpoint import checkpoint_files
from trainer.checkpoint.async_checkpointer import Checkpointing
from trainer.checkpoint.step_dump import DumpWriter
from trainer.clients import Nodes, Samples
from trainer.config import TrainerConfig
from trainer.data.advantages import assign_credit
from trainer.data.gradient_chunks import Part
from trainer.data.micro_batch import plan
from trainer.data.token_sequence import trainable_tokens
from trainer.device_lease import Device, GangThread
from trainer.policy.commands import Accumulate, Gather, Load, Optimize
from trainer.publish.publisher import Publisher, Publishing, PublishPutOff
from trainer.tracking.step_record import MetricsFile, StepRecord
from trainer.tracking.tracker import Trackers

__all__ = ["Progress", "Trainer", "find_checkpoint"]


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where training stands."""

    step: int = 0
    """Finished optimizer steps."""
    training: bool = False
    """True while a step is computed."""
    finished: bool = False
    """True after the last step."""
    record: StepRecord | None = None
    """Of the last step."""


class Trainer:
    """Rank 0's loop: step after step.

    Beside the next one goes what a step leaves behind: checkpoint durable, samples committed,
    weights published.
    """

    def __init__(
        self,
        config: TrainerConfig,
        gang: GangThread,
        device: Device,
        samples: Samples,
        nodes: Nodes,
        publisher: Publisher,
        trackers: Trackers,
    ) -> None:
        self.progress = Progress()
        self._config = config
        self._gang, self._device = gang, device
        self._samples, self._nodes = samples, nodes
        self._batches = Batches(config, samples, nodes, gang.world_size)
        self._algorithm = make_algorithm(config)
        self._metrics = MetricsFile(config.metrics_file)
        self._trackers = trackers
        self._dump = DumpWriter(config)
        self._checkpointing = Checkpointing(config, gang, samples)
        self._publishing = Publishing(publisher)
        self._postponed = False

    @property
    def weight_version(self) -> int:
        """Newest version published; 0: the model the run started from."""
        return self._publishing.weight_version

    @property
    def checkpoint_step(self) -> int:
        """Newest step with a durable checkpoint; 0: none."""
        return self._checkpointing.step

    async def train(self) -> None:
        """Reconcile, then step after step until the last one."""
        checkpointing, publishing = self._checkpointing, self._publishing
        works = checkpointing.writing, checkpointing.committing, publishing.work
        await beside(self._train(), *works)

    async def settle(self) -> None:
        """Wait until the checkpoint under way is durable, and its samples are committed.

        If it fails, `train` says so.
        """
        with suppress(Exception):
            await self._checkpointing.end()

    async def _train(self) -> None:
        await self._begin()
        while self.progress.step < self._config.num_steps:
            step = self.progress.step + 1
            record = StepRecord(step, self._publishing.begun_version)
            async for part in self._batches.parts(record):
                async with self._device.use(self._nodes.acquire):
                    await self._accumulate(part, record)
                    if part.last:
                        await self._optimize(record)
                        await self._save(record)
            await self._publish(record)
            self._close(record)
        await self._checkpointing.end()
        self.progress.finished = True
        await self._nodes.release()

    async def save_checkpoint(self) -> int:
        """Checkpoint the newest finished step, unless one covers it; its number."""
        await self._checkpointing.end()
        if self._uncovered() is None:
            return self.checkpoint_step
        async with self._device.use(self._nodes.acquire):
            # Only now: the step may have ended meanwhile. Between its parts the weights are those
            # of the step before.
            record = self._uncovered()
            if record is not None:
                await self._checkpointing.begin(record, self.weight_version)
        await self._batches.give_back()
        await self._checkpointing.end()
        return self.checkpoint_step

    def _uncovered(self) -> StepRecord | None:
        """The record of the newest finished step, if no checkpoint covers it."""
        covered = self._checkpointing.begun_step == self.progress.step
        return None if covered else self.progress.record

    async def _begin(self) -> None:
        """Load the newest checkpoint, take over the run's samples, show the weights."""
        found = await self._take_over()
        if found is not None:
            folder, state = found
            self.progress.step = state.step
            self._checkpointing.resumed(state.step)
            get_logger().info("resumed", step=state.step, changed=_changed(state, self._config))
            async with self._device.use(self._nodes.acquire):
                await self._gang.do(Load(folder=str(folder)))
        self._metrics.begin(self.progress.step, found[1].record if found else {})
        if await self._weights_lost():
            await self._begin_publish(await self._gather(), self.progress.step)
            await self._publishing.end()
        if self._config.scheduler is not None:
            # The node belongs to whom the scheduler gives it; it will resume us.
            await self._device.begin_suspended()

    async def _take_over(self) -> tuple[Path, checkpoint_files.Checkpoint] | None:
        """Fence older trainers, at the newest checkpoint: one may have gone on until then."""
        while True:
            step = _step_of(find_checkpoint(self._config))
            await self._samples.reconcile(step)
            found = find_checkpoint(self._config)
            if _step_of(found) == step:
                return found

    async def _weights_lost(self) -> bool:
        """Whether servers lack the weights training goes on with: they see older or undone ones."""
        step = self.progress.step
        newest = await self._publishing.newest()
        published = 0 if newest is None else newest.step
        last = step == self._config.num_steps
        due = step if last else step - step % self._config.publish_every
        return published > step or published < due

    async def _accumulate(self, part: Part, record: StepRecord) -> None:
        self.progress.training = True
        commands = self._commands(part, record)
        if record.num_samples == 0 and (folder := self._dump.begin(record.step)):
            await self._gang.save(folder)
            await self._gang.written(folder)
        self._dump.part(record.step, commands)
        with record.phase("train"):
            await self._gang.do_each(commands)
        record.add(part.sequences)
        self.progress.training = part.last

    async def _optimize(self, record: StepRecord) -> None:
        with record.phase("train"):
            answers = await self._gang.do(Optimize(step=record.step))
        self._dump.end(record.step, self._gang.world_size, answers[0])
        record.result(answers[0], self._config.reward)
        self.progress.step = record.step
        self.progress.record = record

    async def _save(self, record: StepRecord) -> None:
        if self._due(record.step, self._config.checkpoint_every):
            await self._checkpointing.begin(record, self.weight_version)

    def _commands(self, part: Part, record: StepRecord) -> list[Accumulate]:
        shuffle = np.random.default_rng([self._config.seed, record.step, record.num_samples])
        given = assign_credit(
            part.sequences,
            self._algorithm,
            self._config,
            shuffle if self._config.shuffle_rewards else None,
        )
        shares = plan(
            part.sequences,
            given,
            num_ranks=self._gang.world_size,
            micro_batch_tokens=self._config.micro_batch_tokens,
            packed=self._gang.packed,
            whole_groups=self._algorithm.whole_groups,
        )
        return [
            Accumulate(
                weight_version=self._publishing.begun_version,
                num_tokens=trainable_tokens(part.sequences),
                denominator=given.denominator,
                micro_batches=share,
            )
            for share in shares
        ]

    async def _gather(self) -> dict[str, torch.Tensor]:
        """The whole weights, on the host."""
        async with self._device.use(self._nodes.acquire):
            await self._gang.do(Gather())
            return self._gang.gathered()

    async def _may_publish(self, step: int) -> bool:
        """Under WAIT a publish is put off for a step while it would make work in flight too old.

        The trainer goes on meanwhile: that work can only be leased before the publish.
        """
        if step == self._config.num_steps:
            return True
        return await self._samples.may_publish(self._publishing.begun_version + 1)

    async def _publish(self, record: StepRecord) -> None:
        """Begin to publish if it is due; the next step goes on meanwhile. The last one waits.

        Only what training waits for counts as the step's publish phase.
        """
        if not (self._postponed or self._due(record.step, self._config.publish_every)):
            return
        self._postponed = True
        with record.phase("publish"):
            # Before the weights are copied: one copy on the host is enough. And while the device
            # may be taken away: this may have to wait for other services.
            await self._publishing.make_way()
            weights = await self._gather()
            while self._postponed and await self._may_publish(record.step):
                self._postponed = not await self._tried(weights, record.step)
                if record.step < self._config.num_steps:
                    return

    async def _tried(self, weights: Mapping[str, torch.Tensor], step: int) -> bool:
        """Whether a publish is under way, and done if it is the last."""
        try:
            await self._begin_publish(weights, step)
        except PublishPutOff as error:
            get_logger().warning("publish_put_off", step=step, error=str(error))
            return False
        if step == self._config.num_steps:
            await self._publishing.end()
        return True

    async def _begin_publish(self, weights: Mapping[str, torch.Tensor], step: int) -> None:
        # Nothing that was published is ever undone, if every step has a checkpoint.
        covered = partial(self._checkpointing.committed, step)
        after = covered if self._config.checkpoint_every == 1 else None
        epoch = self._samples.epoch
        await self._publishing.begin(weights, step=step, epoch=epoch, after=after)

    def _close(self, record: StepRecord) -> None:
        record.published(self._publishing.begun_version)
        self.progress.training = False
        self._metrics.append(record)
        record.observe()
        numbers = {**record.numbers(), "step": record.step}
        self._trackers.log(record.step, numbers)
        get_logger().info("step", **numbers)

    def _due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self._config.num_steps


def find_checkpoint(config: TrainerConfig) -> tuple[Path, checkpoint_files.Checkpoint] | None:
    """The checkpoint to resume from.

    Raises:
        ValueError: there is one and `resume` is not set, or it is of another run.
    """
    found = checkpoint_files.newest(config.checkpoint_folder)
    if found is None:
        return None
    folder, state = found
    if not config.resume:
        raise ValueError(
            f"checkpoint_folder {config.checkpoint_folder} holds a checkpoint of step "
            f"{state.step}: set resume to go on from it, or give another folder"
        )
    if state.run_id != config.run_id:
        raise ValueError(
            f"checkpoint {folder} is of run {state.run_id!r}, not {config.run_id!r}: "
            "give the run's own checkpoint_folder"
        )
    if bool(state.base) != bool(config.lora_rank):
        raise ValueError(
            f"checkpoint {folder} was written with{'' if state.base else 'out'} an adapter, "
            f"and lora_rank is {config.lora_rank}: set it back"
        )
    if state.base != config.base():
        raise ValueError(
            f"checkpoint {folder} holds an adapter to other weights than those of model "
            f"{config.model}: give the model that the run began with"
        )
    return found


def _step_of(found: tuple[Path, checkpoint_files.Checkpoint] | None) -> int:
    return 0 if found is None else found[1].step


def _changed(state: checkpoint_files.Checkpoint, config: TrainerConfig) -> list[str]:
    """Settings that differ from the checkpoint's: the run goes on, but not as it would have."""
    now, then = config.mathematics(), state.mathematics
    return sorted(name for name in now.keys() & then.keys() if now[name] != then[name])
