"""The wait for each step's batch, in which the nodes are given back, and the end of the wait.

WAITING -> (batch full, or begun, or its timeout over) -> nodes asked for -> LEASED, part by part
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from seamflow.scheduler.v1.scheduler_service_pb2 import Outlook
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb2

from services.chassis import metrics
from services.chassis.log import get_logger
from trainer.batch_forecast import BatchTimeout, Forecast, Readiness
from trainer.clients import Nodes, Samples
from trainer.config import TrainerConfig
from trainer.data.gradient_chunks import Part, Rounds
from trainer.data.token_sequence import TokenSequence, sequence
from trainer.tracking.step_record import StepRecord

__all__ = ["Batches"]


class Batches:
    """Gives the trainer what each step is trained on."""

    def __init__(
        self, config: TrainerConfig, samples: Samples, nodes: Nodes, num_ranks: int = 1
    ) -> None:
        self._samples, self._nodes = samples, nodes
        self._stream_groups = config.stream_groups
        self._begin_groups = 0  # of the step that is waited for; 0: all
        self._reference_column = config.reference_column
        self._round_tokens = num_ranks * config.micro_batch_tokens
        self._timeout_seconds = config.batch_timeout_seconds or math.inf
        self._min_groups = config.batch_min_groups
        self._request_ahead_seconds = config.request_ahead_seconds
        self._timeouts = metrics.counter(
            "trainer", "batch_timeouts_total", "Waits that ended without a whole batch"
        )
        self._group_rollouts = 0.0
        self._done_rollouts: int | None = None  # since the outlook before; None: none told yet
        self._lent = False  # the nodes were given back, and are not asked for again yet

    async def parts(self, record: StepRecord) -> AsyncIterator[Part]:
        """Wait for a step's batch, then for the nodes; lease it. Seconds go into `record`.

        The batch is one part, or with `stream_groups` there is one whenever enough groups came.
        """
        timeout = BatchTimeout(
            time=time.time() + self._timeout_seconds, min_groups=self._min_groups
        )
        # What only the gang's own nodes could generate would never come while it has them.
        streams = self._stream_groups > 0 and await self._nodes.others_generate()
        self._begin_groups = self._stream_groups if streams else 0
        found = list[TokenSequence]()
        async for part in (self._streamed if streams else self._whole)(record, timeout):
            found += part.sequences
            if part.last:
                self._count(found)
            yield part

    async def _whole(self, record: StepRecord, timeout: BatchTimeout) -> AsyncIterator[Part]:
        leased = None
        while leased is None:
            ready = await self._begin(record, timeout)
            with record.phase("lease"):
                min_groups = 0 if ready.full else self._min_groups
                leased = await self._samples.lease(
                    record.step, record.base_weight_version, min_groups
                )
        if not ready.full:
            self._tell_timeout(ready)
        record.leased(leased.max_staleness)
        yield Part(sequences=self._sequences(leased), last=True)

    async def _streamed(self, record: StepRecord, timeout: BatchTimeout) -> AsyncIterator[Part]:
        ready = await self._begin(record, timeout)
        rounds, last = Rounds(self._round_tokens), False
        while not last:
            with record.phase("wait"):
                page = await self._page(record, timeout, rounds)
                if page is None and not await self._nodes.others_generate():
                    await self._nodes.release(record.step)
            last = page is not None and page.next_sample == 0
            fresh = [] if page is None else self._sequences(page)
            for part in rounds.cut(fresh, settled=page is None, last=last):
                yield part
        if rounds.num_groups < ready.needed and timeout.time <= time.time():
            self._tell_timeout(Readiness(rounds.num_groups, ready.needed))

    async def _page(
        self, record: StepRecord, timeout: BatchTimeout, rounds: Rounds
    ) -> sample_pb2.LeaseSamplesResponse | None:
        """What follows on what arrived; None if nothing does yet, at once if a group waits for it.

        Once it is time the step takes no more than it can have now.
        """
        page = await self._samples.stream(
            record.step,
            record.base_weight_version,
            rounds.num_arrived,
            min_groups=self._min_groups if timeout.time <= time.time() else 0,
            wait=not rounds.unsettled,
        )
        if page is not None:
            record.leased(page.max_staleness)
        return page

    def _sequences(self, page: sample_pb2.LeaseSamplesResponse) -> list[TokenSequence]:
        return [sequence(sample, self._reference_column) for sample in page.samples]

    async def _begin(self, record: StepRecord, timeout: BatchTimeout) -> Readiness:
        """Wait until training can begin and the nodes are there."""
        with record.phase("wait"):
            ready = await self._wait(record, timeout)
            await self._nodes.acquire(record.step)
        return ready

    async def _ready(
        self, record: StepRecord, *, more_than: int = 0, wait_seconds: float = 0.0
    ) -> Readiness:
        ready = await self._samples.ready(
            record.step,
            record.base_weight_version,
            more_than=more_than,
            wait_seconds=wait_seconds,
        )
        return replace(ready, stream=self._begin_groups)

    async def give_back(self) -> None:
        """Give nodes back that were taken for something else than the batch while they are lent."""
        if self._lent:
            await self._nodes.give_back()

    async def _wait(self, record: StepRecord, timeout: BatchTimeout) -> Readiness:
        """Give the nodes back until there is enough; ask for them so that they are back by then."""
        ready = await self._ready(record)
        if timeout.enough(time.time(), ready):
            return ready
        await self._nodes.release(record.step, self._outlook(ready))
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
            more_than = ready.num_ready
            ready = await self._ready(record, more_than=more_than, wait_seconds=wait_seconds)
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
        # The gang is away until so many are there.
        missing = ready.begin - ready.num_ready
        return Outlook(
            remaining_rollouts=math.ceil(missing * self._group_rollouts),
            batch_rollouts=math.ceil(ready.needed * self._group_rollouts),
            done_rollouts=done,
        )

    def _count(self, sequences: Sequence[TokenSequence]) -> None:
        """Learn how many rollouts a group has."""
        fresh = [item for item in sequences if not item.replayed]
        group_ids = {item.group_id for item in fresh}
        rollout_ids = {item.rollout_id for item in fresh}
        self._group_rollouts = len(rollout_ids) / max(len(group_ids), 1)
        if self._done_rollouts is not None:
            self._done_rollouts += len(rollout_ids)

    def _tell_timeout(self, ready: Readiness) -> None:
        self._timeouts.inc()
        get_logger().info("batch_timed_out", num_ready=ready.num_ready, needed=ready.needed)
