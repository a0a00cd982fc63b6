"""The wait for each step's batch, in which the nodes are given back, and the end of the wait.

WAITING -> (batch full, or its timeout over) -> nodes asked for -> LEASED
"""

from __future__ import annotations

import math
import time

from seamflow.scheduler.v1.scheduler_service_pb2 import Outlook
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb2

from services.chassis import metrics
from services.chassis.log import get_logger
from trainer.config import TrainerConfig
from trainer.peers import Nodes, Samples
from trainer.readiness import BatchTimeout, Forecast, Readiness
from trainer.record import StepRecord

__all__ = ["Batches"]


class Batches:
    """Gives the trainer what each step is trained on."""

    def __init__(self, config: TrainerConfig, samples: Samples, nodes: Nodes) -> None:
        self._samples, self._nodes = samples, nodes
        self._timeout_seconds = config.batch_timeout_seconds or math.inf
        self._min_groups = config.batch_min_groups
        self._request_ahead_seconds = config.request_ahead_seconds
        self._timeouts = metrics.counter(
            "trainer", "batch_timeouts_total", "Waits that ended without a whole batch"
        )
        self._group_rollouts = 0.0
        self._done_rollouts: int | None = None  # since the outlook before; None: none told yet
        self._lent = False  # the nodes were given back, and are not asked for again yet

    async def next(self, record: StepRecord) -> sample_pb2.LeaseSamplesResponse:
        """Wait for the batch of a step, then for the nodes; lease it. Seconds go into `record`."""
        timeout = BatchTimeout(
            time=time.time() + self._timeout_seconds, min_groups=self._min_groups
        )
        while True:
            with record.phase("wait"):
                ready = await self._wait(record.step, timeout)
                await self._nodes.acquire(record.step)
            with record.phase("lease"):
                min_groups = 0 if ready.full else self._min_groups
                leased = await self._samples.lease(
                    record.step, record.base_weight_version, min_groups
                )
            if leased is not None:
                self._count(leased, ready)
                return leased

    async def give_back(self) -> None:
        """Give nodes back that were taken for something else than the batch while they are lent."""
        if self._lent:
            await self._nodes.give_back()

    async def _wait(self, step: int, timeout: BatchTimeout) -> Readiness:
        """Give the nodes back until there is enough; ask for them so that they are back by then."""
        ready = await self._samples.ready(step)
        if timeout.enough(time.time(), ready):
            return ready
        await self._nodes.release(step, self._outlook(ready))
        self._lent = True
        forecast = Forecast(min(self._nodes.return_seconds, self._request_ahead_seconds), timeout)
        while not timeout.enough(time.time(), ready):
            forecast.saw(time.time(), ready)
            needed_time = forecast.ask_for(time.time())
            if needed_time is not None:
                self._lent = False
                await self._nodes.ask_ahead(needed_time)
            elif forecast.came_too_early(time.time()):
                self._lent = True
                await self._nodes.give_back()
            wait_seconds = forecast.look_seconds(time.time())
            ready = await self._samples.ready(
                step, more_than=ready.num_ready, wait_seconds=wait_seconds
            )
        self._lent = False
        return ready

    def _outlook(self, ready: Readiness) -> Outlook | None:
        """What is left of the batch, and what was done before it.

        A group that is not complete counts as a whole.
        """
        # What an earlier life of the trainer did is not known: the first outlook does not tell.
        done, self._done_rollouts = self._done_rollouts or 0, 0
        if self._group_rollouts == 0:
            return None
        missing = ready.needed - ready.num_ready
        return Outlook(
            remaining_rollouts=math.ceil(missing * self._group_rollouts),
            batch_rollouts=math.ceil(ready.needed * self._group_rollouts),
            done_rollouts=done,
        )

    def _count(self, leased: sample_pb2.LeaseSamplesResponse, ready: Readiness) -> None:
        """Learn how many rollouts a group has, and tell of a timeout."""
        fresh = [sample for sample in leased.samples if not sample.replayed]
        group_ids = {sample.group_id for sample in fresh}
        rollout_ids = {sample.rollout_id for sample in fresh}
        self._group_rollouts = len(rollout_ids) / max(len(group_ids), 1)
        if self._done_rollouts is not None:
            self._done_rollouts += len(rollout_ids)
        if not ready.full:
            self._timeouts.inc()
            get_logger().info("batch_timed_out", num_ready=ready.num_ready, needed=ready.needed)
