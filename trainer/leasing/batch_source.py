"""The source of each step's batch: wait for its groups, lend and recall the nodes, lease it.

WAITING -> (batch full, step started, or timeout over) -> nodes acquired -> LEASED, chunk by chunk
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from seamflow.durations import to_duration
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb
from seamflow.scheduler.v1.scheduler_service_pb2 import GenerationForecast, MeasuredBatch
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb2

from services.chassis import metrics
from services.chassis.log import get_logger
from trainer.clients.node_client import NodeClient
from trainer.clients.sample_client import BatchProgress, BatchTimeout, SampleClient
from trainer.config import TrainerConfig
from trainer.data.gradient_chunks import GradientChunk, GroupChunker
from trainer.data.token_sequence import TokenSequence
from trainer.leasing.accepted_samples import AcceptedSamples
from trainer.tracking.step_record import StepRecord

_MIN_GROUPS = 4
_WINDOW_SHARE = 0.25
"""The rate is that of the last quarter of a batch: it falls towards the end, with the long tail."""
_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.05, 20.0


def predict_full(history: Sequence[tuple[float, int]], needed: int) -> float | None:
    """When `needed` groups will be ready, extrapolating the most recent rate.

    Args:
        history: (seconds, ready groups) in order; the last entry is now.
        needed: groups of a batch.

    Returns:
        Seconds on the same clock; None: the history or the batch is too small for a prediction.
    """
    now, num_ready = history[-1]
    window = max(_WINDOW_SHARE * needed, 1)
    earlier = [entry for entry in history if entry[1] <= num_ready - window]
    if needed < _MIN_GROUPS or 2 * num_ready < needed or not earlier:
        return None
    since, had = earlier[-1]
    return now + (needed - num_ready) * (now - since) / (num_ready - had)


class NodeRecall:
    """Decides, during the wait for one batch, when to request nodes and when to release them again.

    WAITING -> REQUESTED -> RELEASED: nodes that returned too early do not wait indefinitely.

    Args:
        return_seconds: time the nodes need to return; 0: never request them ahead.
        timeout: when the wait ends with a partial batch.
    """

    def __init__(self, return_seconds: float, timeout: BatchTimeout) -> None:
        self._return_seconds = return_seconds
        self._timeout = timeout
        self._history: list[tuple[float, int]] = []
        self._request_time = math.inf
        self._release_time: float | None = None

    def observe(self, now: float, progress: BatchProgress) -> None:
        """Record the progress at `now` and predict when to request the nodes."""
        self._history.append((now, progress.num_ready))
        if self._return_seconds > 0 and self._release_time is None:
            full = predict_full(self._history, progress.start)
            partial = self._timeout.start_time(progress)
            start = partial if full is None else min(full, partial)
            self._request_time = start - self._return_seconds

    def take_request(self, now: float) -> bool:
        """Whether the time has come from which the nodes must return; true once."""
        if self._release_time is not None or self._request_time > now:
            return False
        # Idle for as long as the way back took: by then, releasing the nodes again pays.
        self._release_time = now + 2 * self._return_seconds
        return True

    def take_release(self, now: float) -> bool:
        """Whether the requested nodes came too early and must be released again; true once."""
        if self._release_time is None or now < self._release_time:
            return False
        self._release_time = math.inf
        return True

    def poll_seconds(self, now: float) -> float:
        """How long to wait for the next group before deciding again."""
        due = self._request_time if self._release_time is None else self._release_time
        if self._timeout.time > now:
            due = min(due, self._timeout.time)
        return min(max(due - now, _MIN_POLL_SECONDS), _MAX_POLL_SECONDS)


_REQUEST_AHEAD_SECONDS = 30.0
"""Request nodes before the batch is full, by the measured time of their return, at most this
much."""


class BatchSource:
    """Yields the gradient chunks of each step; while a batch fills, the nodes are lent."""

    def __init__(
        self,
        config: TrainerConfig,
        samples: SampleClient,
        nodes: NodeClient,
        accepted: AcceptedSamples,
        num_ranks: int = 1,
    ) -> None:
        self._samples, self._nodes, self._accepted = samples, nodes, accepted
        self.stream_groups = config.batch.stream_groups
        """Groups after which a step starts; 0: a full batch, or as `start_at_tail` says."""
        self.start_at_tail = config.batch.start_at_tail
        """Whether a step starts when the scheduler says that the tail of its batch begins."""
        self._measures = self.start_at_tail and not self.stream_groups  # for the scheduler
        self._start_groups = 0  # of the current step; 0: a full batch
        self._streams = False  # whether the current step may start with less
        self._chunk_tokens = num_ranks * config.batch.micro_batch_tokens
        self._timeout_seconds = config.batch.timeout_seconds or math.inf
        self._min_groups = config.batch.min_groups
        self._timeouts = metrics.counter(
            "trainer", "batch_timeouts_total", "Waits that ended with a partial batch"
        )
        self._rollouts_per_group = 0.0
        self._newest: tuple[MeasuredBatch, StepRecord] | None = None  # if it starts at the tail
        self._done_rollouts: int | None = None  # since the last release; None: before the first one
        self._lent = False  # released, and not requested again yet

    async def chunks(self, record: StepRecord) -> AsyncIterator[GradientChunk]:
        """Wait for a step's batch and the nodes, and lease the batch. `record` gets the seconds.

        One chunk is the whole batch; with `batch.stream_groups` or `batch.start_at_tail`, chunks
        follow as groups complete. A step that an earlier trainer leased is cut as it was then.
        """
        leased = list[TokenSequence]()
        async for chunk in self._chunks(record):
            leased += chunk.sequences
            if chunk.last:
                self._count(leased)
                self._measure(leased, record)
            yield chunk

    async def _chunks(self, record: StepRecord) -> AsyncIterator[GradientChunk]:
        for chunk in (repeated := await self._repeated(record)):
            yield chunk
        if repeated:
            return
        timeout = BatchTimeout(
            time=time.monotonic() + self._timeout_seconds, min_groups=self._min_groups
        )
        # Groups that only the gang's own nodes could generate do not complete while it trains.
        may_stream = self.stream_groups > 0 or self.start_at_tail
        self._streams = may_stream and await self._nodes.others_generate()
        self._start_groups = self.stream_groups if self._streams else 0
        async for chunk in (self._streamed if self._streams else self._whole)(record, timeout):
            yield chunk

    async def _repeated(self, record: StepRecord) -> list[GradientChunk]:
        """The chunks of a step that an earlier trainer leased whole; none: it is to be leased."""
        if not self._samples.repeats(record.step):
            return []
        with record.phase("wait"):
            await self._nodes.acquire(record.step)
        with record.phase("lease"):
            leased = await self._samples.read_pending(record.step)
        _note(record, leased)
        sequences = await self._accepted.read(record.step, leased)
        if sequences is None:
            return []
        if not leased.streamed:
            return [GradientChunk(sequences=sequences, last=True)]
        chunker = GroupChunker(self._chunk_tokens)
        return [*chunker.push(sequences, group_complete=True, last=True)]

    async def _whole(
        self, record: StepRecord, timeout: BatchTimeout
    ) -> AsyncIterator[GradientChunk]:
        sequences = None
        while sequences is None:
            progress = await self._wait_for_batch_and_nodes(record, timeout)
            with record.phase("lease"):
                min_groups = 0 if progress.full else self._min_groups
                leased = await self._samples.lease(
                    record.step, record.base_weight_version, min_groups
                )
            if leased is not None:
                sequences = await self._accepted.read(record.step, leased)
            if leased is not None and sequences is not None:
                _note(record, leased)
        if not progress.full:
            self._log_timeout(progress)
        yield GradientChunk(sequences=sequences, last=True)

    async def _streamed(
        self, record: StepRecord, timeout: BatchTimeout
    ) -> AsyncIterator[GradientChunk]:
        progress = await self._wait_for_batch_and_nodes(record, timeout)
        chunker, last = GroupChunker(self._chunk_tokens), False
        while not last:
            with record.phase("wait"):
                page = await self._next_page(record, timeout, chunker)
                if page is None and not await self._nodes.others_generate():
                    await self._nodes.release(record.step)
            fresh = [] if page is None else await self._accepted.read(record.step, page, chunker)
            if fresh is None:
                continue  # the page without what was rejected
            last = page is not None and page.next_sample == 0
            for chunk in chunker.push(fresh, group_complete=page is None, last=last):
                yield chunk
        if chunker.num_groups < progress.needed and timeout.time <= time.monotonic():
            self._log_timeout(BatchProgress(chunker.num_groups, progress.needed))

    async def _next_page(
        self, record: StepRecord, timeout: BatchTimeout, chunker: GroupChunker
    ) -> sample_pb2.LeaseSamplesResponse | None:
        """The next samples of the step; None: there are none yet.

        Does not block while the chunker holds a group that may be complete. After the timeout the
        step ends with the groups that are complete now.
        """
        page = await self._samples.lease_page(
            record.step,
            record.base_weight_version,
            chunker.num_sequences,
            min_groups=self._min_groups if timeout.time <= time.monotonic() else 0,
            wait=not chunker.has_open_group,
        )
        if page is not None:
            _note(record, page)
        return page

    async def _wait_for_batch_and_nodes(
        self, record: StepRecord, timeout: BatchTimeout
    ) -> BatchProgress:
        with record.phase("wait"):
            progress = await self._wait_for_batch(record, timeout)
            record.started(progress.num_ready)
            await self._nodes.acquire(record.step)
        return progress

    async def _progress(
        self, record: StepRecord, *, more_than: int = 0, wait_seconds: float = 0.0
    ) -> BatchProgress:
        progress = await self._samples.progress(
            record.step,
            record.base_weight_version,
            more_than=more_than,
            wait_seconds=wait_seconds,
        )
        return replace(progress, stream=self._start_groups)

    async def release_if_lent(self) -> None:
        """Release nodes that were acquired for something other than the batch during its wait."""
        if self._lent:
            await self._nodes.release_again()

    async def _wait_for_batch(self, record: StepRecord, timeout: BatchTimeout) -> BatchProgress:
        """Release the nodes until enough groups are ready; request them to be back by then."""
        progress = await self._progress(record)
        if timeout.allows_start(time.monotonic(), progress):
            return progress
        remaining = await self._nodes.release(record.step, self._forecast(progress))
        self._lent = True
        progress = self._with_tail(progress, remaining or 0)
        recall = NodeRecall(min(self._nodes.return_seconds, _REQUEST_AHEAD_SECONDS), timeout)
        while not timeout.allows_start(time.monotonic(), progress):
            recall.observe(time.monotonic(), progress)
            if recall.take_request(time.monotonic()):
                self._lent = False
                await self._nodes.request_ahead()
            elif recall.take_release(time.monotonic()):
                self._lent = True
                await self._nodes.release_again()
            wait_seconds = recall.poll_seconds(time.monotonic())
            more_than = progress.num_ready
            progress = await self._progress(record, more_than=more_than, wait_seconds=wait_seconds)
        self._lent = False
        return progress

    def _with_tail(self, progress: BatchProgress, remaining: int) -> BatchProgress:
        """Start the step when `remaining` rollouts of incomplete groups are left; 0 for none."""
        if self._streams and self.start_at_tail and not self.stream_groups and remaining:
            late_groups = round(remaining / self._rollouts_per_group)
            self._start_groups = max(progress.needed - late_groups, 1)
        return replace(progress, stream=self._start_groups)

    def _forecast(self, progress: BatchProgress) -> GenerationForecast | None:
        """Rollouts missing from the batch and done since the last release; None: not known yet.

        A group that is not complete counts as missing entirely.
        """
        # Rollouts leased before a restart are not known, so the first release reports 0.
        done, self._done_rollouts = self._done_rollouts or 0, 0
        if self._rollouts_per_group == 0:
            return None
        missing = progress.start - progress.num_ready
        return GenerationForecast(
            remaining_rollouts=math.ceil(missing * self._rollouts_per_group),
            batch_rollouts=math.ceil(progress.needed * self._rollouts_per_group),
            done_rollouts=done,
            newest_batch=self._newest_batch(),
            done_tokens=self._nodes.done_tokens,
        )

    def _measure(self, sequences: Sequence[TokenSequence], record: StepRecord) -> None:
        """Keep the lengths of a step that is about to end, for the scheduler."""
        measured = measured_batch(sequences) if self._measures else None
        self._newest = None if measured is None else (measured, record)

    def _newest_batch(self) -> MeasuredBatch | None:
        """The newest step's lengths, with the time that it trained."""
        if self._newest is None:
            return None
        measured, record = self._newest
        measured.training_duration.CopyFrom(to_duration(record.seconds("train")))
        return measured

    def _count(self, sequences: Sequence[TokenSequence]) -> None:
        """Count the tokens of a step, and its rollouts without replayed ones."""
        self._nodes.done_tokens = sum(len(item.token_ids_T) for item in sequences)
        fresh = [item for item in sequences if not item.replayed]
        group_ids = {item.group_id for item in fresh}
        rollout_ids = {item.rollout_id for item in fresh}
        self._rollouts_per_group = len(rollout_ids) / max(len(group_ids), 1)
        if self._done_rollouts is not None:
            self._done_rollouts += len(rollout_ids)

    def _log_timeout(self, progress: BatchProgress) -> None:
        self._timeouts.inc()
        get_logger().info("batch_timed_out", num_ready=progress.num_ready, needed=progress.needed)


def _note(record: StepRecord, leased: sample_pb2.LeaseSamplesResponse) -> None:
    tells_base = leased.HasField("base_weight_version")
    record.leased(leased.max_staleness, leased.base_weight_version if tells_base else None)


def measured_batch(sequences: Sequence[TokenSequence]) -> pb.MeasuredBatch | None:
    """Tokens that its rollouts sampled, without its training time; None if none of them is new.

    Replayed samples are no work of generation. A rollout with a rewritten history counts the
    tokens of all its sequences, one without sampled tokens counts one.
    """
    sampled: dict[str, Counter[str]] = defaultdict(Counter)
    num_tokens = 0
    for item in sequences:
        if not item.replayed:
            sampled[item.group_id][item.rollout_id] += int(item.loss_mask_T.sum())
            num_tokens += len(item.token_ids_T)
    if not sampled:
        return None
    groups = [[max(number, 1) for number in group.values()] for group in sampled.values()]
    num_rollouts, num_sampled = sum(map(len, groups)), sum(map(sum, groups))
    return pb.MeasuredBatch(
        groups=[pb.GroupTokens(rollout_tokens=group) for group in groups],
        prompt_tokens=max(num_tokens - num_sampled, 0) / num_rollouts,
    )
