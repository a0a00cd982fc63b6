"""Publish weights in the background of training, one version after another.

StreamRL's full overlap (arXiv 2504.15930): training waits only for the number of a version and for
a copy of the weights on the host.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from seamflow.weights.v1 import weight_service_pb2 as weight_pb2

from services.chassis.log import get_logger
from services.chassis.rpc import tracing
from trainer.background.background_task import BackgroundTask
from trainer.clients.sample_client import SampleClient
from trainer.config import TrainerConfig
from trainer.publish.attempt_messages import BucketsLostError
from trainer.publish.publisher import Publisher, PublishPostponed
from trainer.publish.snapshot_weights import SnapshotLostError, SnapshotWeights
from trainer.tracking.step_record import StepRecord

TakeSnapshot = Callable[[], Awaitable[SnapshotWeights]]
_RETRY_SECONDS = 1.0
"""After ranks could not bring the weights together."""


class AsyncPublisher:
    """Decides which steps publish, and publishes them while training continues.

    A publish that misses a deadline is retried until newer weights supersede it. One whose snapshot
    lost a rank is postponed to newer weights. None waits for a
    checkpoint: a restarted trainer repeats the steps since its checkpoint on the samples that they
    had, and finds again what is published.

    Args:
        samples: knows which rollouts in flight a publish would make too old, and which steps are
            repeated.
        take_snapshot: copies the weights, where the ranks write them from.
    """

    def __init__(
        self,
        config: TrainerConfig,
        publisher: Publisher,
        samples: SampleClient,
        take_snapshot: TakeSnapshot,
    ) -> None:
        self._config = config
        self._publisher, self._samples = publisher, samples
        self._take_snapshot = take_snapshot
        self._ahead: weight_pb2.Manifest | None = None  # of a step that is still to be repeated
        self._postponed = False
        self._superseded = False
        self.task = BackgroundTask()
        self.weight_version = 0
        """Newest committed version that is known; 0: the model the run started from."""
        self.started_version = 0
        """The version in flight, or else `weight_version`; staleness is relative to it."""

    async def recover(self, step: int) -> None:
        """Publish the weights of the resumed `step`, unless they or later ones are published.

        Later ones stay if their step is repeated on its samples. Else the crash undid them: servers
        get the weights of `step` under a new version.
        """
        manifest = await self._publisher.newest()
        self.weight_version = 0 if manifest is None else manifest.weight_version
        self.started_version = self.weight_version
        published = 0 if manifest is None else manifest.step
        due = step if step == self._config.num_steps else step - step % self._config.publish.every
        if published > step and self._samples.repeats(*range(step + 1, published + 1)):
            self._ahead = manifest
        elif published > step or published < due:
            await self.start(await self._take_snapshot(), step)
            await self.wait()

    async def publish_if_due(self, record: StepRecord, *, last: bool = False) -> None:
        """Start publishing a finished step if it is due or an earlier one was postponed.

        A repeated step is not published again: what was published last is compared with it.
        Publishing continues during the next step; after the last step, this waits until it is done.
        The time training waits is the step's phase "publish".
        """
        step = record.step
        if not self._is_due(step, last=last):
            return
        with record.phase("publish"):
            # Before the weights are copied, as the host has room for one copy; and while the device
            # may be taken away, as this may wait for other services.
            await self.supersede()
            await self._publish(step, last=last)
            while last and self._postponed:
                await self._publish(step, last=last)

    def _is_due(self, step: int, *, last: bool) -> bool:
        if self._ahead is not None and step <= self._ahead.step:
            return last or step == self._ahead.step
        return self._postponed or last or step % self._config.publish.every == 0

    async def _publish(self, step: int, *, last: bool) -> None:
        weights = await self._take_snapshot()
        while (is_published := await self._is_published(step, weights)) is None:
            await asyncio.sleep(_RETRY_SECONDS)
            weights = await self._take_snapshot()
        self._postponed = not (is_published or await self._try_start(weights, step, last=last))
        if last:
            await self.wait()

    async def _is_published(self, step: int, weights: SnapshotWeights) -> bool | None:
        """Whether an earlier trainer published exactly these weights as the newest version.

        None: the ranks could not compute it.
        """
        ahead = self._ahead
        if ahead is None or ahead.step != step:
            self._ahead = None
            return False
        try:
            equal = await self._publisher.holds(ahead, weights)
        except (PublishPostponed, BucketsLostError) as error:
            get_logger().warning("comparison_repeated", step=step, error=str(error))
            return None
        self._ahead = None
        log = get_logger().info if equal else get_logger().warning
        log("step_repeated", step=step, weight_version=ahead.weight_version, equal=equal)
        return equal

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
        await self.task.wait()

    async def start(self, weights: SnapshotWeights, step: int) -> None:
        """Start publishing `weights`; no other publish may be in flight.

        Raises `PublishPostponed`: the weights service gave no version number.
        """
        epoch = self._samples.epoch
        begun = await self._publisher.begin(step=step, parent=self.weight_version, epoch=epoch)
        self.started_version = int(begun.weight_version)
        self.task.start(self._finish(begun, weights, epoch))

    async def _try_start(self, weights: SnapshotWeights, step: int, *, last: bool) -> bool:
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

    async def _finish(
        self,
        begun: weight_pb2.BeginPublishResponse,
        weights: SnapshotWeights,
        epoch: int,
    ) -> None:
        start = time.monotonic()
        # Of the trace of the step in which it was started.
        with tracing.span("write and commit weights", weight_version=begun.weight_version):
            while not await self._try_finish(begun, weights, epoch):
                if self._superseded or self._postponed:
                    self.started_version = self.weight_version
                    return
        self.weight_version = begun.weight_version
        seconds = round(time.monotonic() - start, 4)
        get_logger().info("published", weight_version=begun.weight_version, seconds=seconds)

    async def _try_finish(
        self,
        begun: weight_pb2.BeginPublishResponse,
        weights: SnapshotWeights,
        epoch: int,
    ) -> bool:
        try:
            await self._publisher.finish(begun, weights, epoch=epoch)
        except (PublishPostponed, BucketsLostError) as error:
            version = begun.weight_version
            get_logger().warning("publish_postponed", weight_version=version, error=str(error))
            self._postponed = isinstance(error, SnapshotLostError)
            if isinstance(error, BucketsLostError):
                await asyncio.sleep(_RETRY_SECONDS)
            return False
        return True
