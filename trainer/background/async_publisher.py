"""Publish weights in the background of training, one version after another.

StreamRL's full overlap (arXiv 2504.15930): training waits only for the number of a version and for
a copy of the weights on the host.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import torch
from seamflow.weights.v1 import weight_service_pb2 as weight_pb2

from services.chassis.log import get_logger
from services.chassis.rpc import tracing
from trainer.background.async_checkpointer import AsyncCheckpointer
from trainer.background.background_task import BackgroundTask
from trainer.clients.sample_client import SampleClient
from trainer.config import TrainerConfig
from trainer.publish.publisher import Publisher, PublishPostponed
from trainer.tracking.step_record import StepRecord

__all__ = ["AsyncPublisher"]

Gather = Callable[[], Awaitable[Mapping[str, torch.Tensor]]]


class AsyncPublisher:
    """Decides which steps publish, and publishes them while training continues.

    A publish that misses a deadline is retried until newer weights supersede it. With a checkpoint
    every step, weights are committed after their checkpoint and samples, so that nothing published
    is ever undone by a crash.

    Args:
        config: of the trainer.
        publisher: client of the weights service.
        samples: knows which rollouts in flight a publish would make too old.
        checkpointer: of the same steps.
        gather: gives the whole weights, on the host.
    """

    def __init__(
        self,
        config: TrainerConfig,
        publisher: Publisher,
        samples: SampleClient,
        checkpointer: AsyncCheckpointer,
        gather: Gather,
    ) -> None:
        self._config = config
        self._publisher, self._samples = publisher, samples
        self._checkpointer, self._gather = checkpointer, gather
        self._postponed = False
        self._superseded = False
        self.task = BackgroundTask()
        self.weight_version = 0
        """Newest committed version that is known; 0: the model the run started from."""
        self.started_version = 0
        """The version in flight, or else `weight_version`; staleness is relative to it."""

    async def recover(self, step: int) -> None:
        """Publish the weights of the resumed `step` unless the newest version has them.

        After a crash, servers may have older weights, or those of a step that the crash undid.
        """
        manifest = await self._publisher.newest()
        self.weight_version = 0 if manifest is None else manifest.weight_version
        self.started_version = self.weight_version
        published = 0 if manifest is None else manifest.step
        due = step if step == self._config.num_steps else step - step % self._config.publish.every
        if published > step or published < due:
            await self.start(await self._gather(), step)
            await self.wait()

    async def publish_if_due(self, record: StepRecord, *, last: bool = False) -> None:
        """Start publishing a finished step if it is due or an earlier one was postponed.

        Publishing continues during the next step; after the last step, this waits until it is done.
        The time training waits is the step's phase "publish".
        """
        step = record.step
        if not (self._postponed or last or step % self._config.publish.every == 0):
            return
        with record.phase("publish"):
            # Before the weights are copied, as the host has room for one copy; and while the device
            # may be taken away, as this may wait for other services.
            await self.supersede()
            weights = await self._gather()
            self._postponed = not await self._try_start(weights, step, last=last)
            while last and self._postponed:
                self._postponed = not await self._try_start(weights, step, last=last)
            if last:
                await self.wait()

    async def supersede(self) -> None:
        """Wait until the publish in flight is done or postponed once more: newer weights follow.

        Raises `PublishTimeout`, or another error of the publish.
        """
        self._superseded = True
        try:
            await self.wait()
        finally:
            self._superseded = False

    async def wait(self) -> None:
        """Wait until no publish is in flight. Raises as `supersede`."""
        await self.task.wait()

    async def start(self, weights: Mapping[str, torch.Tensor], step: int) -> None:
        """Start publishing `weights`; no other publish may be in flight.

        Raises `PublishPostponed`: the weights service gave no version number.
        """
        epoch = self._samples.epoch
        begun = await self._publisher.begin(step=step, parent=self.weight_version, epoch=epoch)
        self.started_version = int(begun.weight_version)
        self.task.start(self._finish(begun, weights, epoch, self._commit_condition(step)))

    async def _try_start(
        self, weights: Mapping[str, torch.Tensor], step: int, *, last: bool
    ) -> bool:
        """Whether a publish was started; False: postponed to the next step.

        Under WAIT it is postponed while it would make rollouts in flight too old: they can only be
        leased before the publish. The last step publishes in any case.
        """
        next_version = self.started_version + 1
        if not (last or await self._samples.may_publish(next_version)):
            return False
        try:
            await self.start(weights, step)
        except PublishPostponed as error:
            get_logger().warning("publish_postponed", step=step, error=str(error))
            return False
        return True

    def _commit_condition(self, step: int) -> Callable[[], Awaitable[None]] | None:
        """What the commit waits for; with less than a checkpoint per step it waits for none."""
        if self._config.checkpoint.every > 1:
            return None
        return partial(self._checkpointer.wait_committed, step)

    async def _finish(
        self,
        begun: weight_pb2.BeginPublishResponse,
        weights: Mapping[str, torch.Tensor],
        epoch: int,
        condition: Callable[[], Awaitable[None]] | None,
    ) -> None:
        start = time.monotonic()
        # Of the trace of the step in which it was started.
        with tracing.span("write and commit weights", weight_version=begun.weight_version):
            while not await self._try_finish(begun, weights, epoch, condition):
                if self._superseded:
                    self.started_version = self.weight_version
                    return
        self.weight_version = begun.weight_version
        seconds = round(time.monotonic() - start, 4)
        get_logger().info("published", weight_version=begun.weight_version, seconds=seconds)

    async def _try_finish(
        self,
        begun: weight_pb2.BeginPublishResponse,
        weights: Mapping[str, torch.Tensor],
        epoch: int,
        condition: Callable[[], Awaitable[None]] | None,
    ) -> bool:
        try:
            await self._publisher.finish(begun, weights, epoch=epoch, after=condition)
        except PublishPostponed as error:
            version = begun.weight_version
            get_logger().warning("publish_postponed", weight_version=version, error=str(error))
            return False
        return True
