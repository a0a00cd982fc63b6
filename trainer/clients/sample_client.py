"""The trajectory manager, as the trainer calls it: samples, their leases and the run."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import grpc.aio
from seamflow.durations import seconds_of, to_duration
from seamflow.errors import NotFoundError, PreconditionError
from seamflow.retry import retrying
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import run_service_pb2 as run_pb2
from seamflow.trajectory.v1 import run_service_pb2_grpc as run_grpc
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb2
from seamflow.trajectory.v1 import sample_service_pb2_grpc as sample_grpc
from seamflow.trajectory.v1 import trajectory_pb2

from services.chassis.errors import ConfigError
from services.chassis.log import get_logger
from services.chassis.rpc.clients import retry_forever
from trainer.config import AlgorithmConfig, BatchConfig


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """How many groups of a batch are complete."""

    num_ready: int
    """Complete groups that the trainer may lease."""
    needed: int
    """Groups of a full batch."""
    stream: int = 0
    """Groups after which a streamed step starts; 0: only a full batch starts it."""

    @property
    def start(self) -> int:
        """Groups after which training starts."""
        return min(self.stream or self.needed, self.needed)

    @property
    def full(self) -> bool:
        return self.num_ready >= self.needed


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTimeout:
    """The time from which a partial batch is enough.

    SeamlessFlow (arXiv 2508.11553) interrupts rollout by batch size or by timeout.
    """

    time: float = math.inf
    """Seconds on the caller's monotonic clock; inf: never."""
    min_groups: int = 1
    """Complete groups that a partial batch must have."""

    def allows_start(self, now: float, progress: BatchProgress) -> bool:
        """Whether training can start: enough groups are ready, or the timeout is over."""
        enough = progress.num_ready >= progress.start
        return enough or (now >= self.time and progress.num_ready >= self.min_groups)

    def start_time(self, progress: BatchProgress) -> float:
        """When training can start even if no further group completes; inf: never."""
        return self.time if progress.num_ready >= self.min_groups else math.inf


_PAGE_BYTES = 1 << 20
_MAX_MESSAGE = 2048
_MAX_SAMPLES = 256
_LEASE_POLL_SECONDS = 5.0
"""Shorter: during a lease poll the gang holds nodes that could be lent."""
_MARGIN_SECONDS = 15.0
"""Time after the end of a long poll at which an unanswered call is retried."""


class SampleClient:
    """Client of the trajectory manager's samples and run, under one trainer epoch."""

    def __init__(self, channel: grpc.aio.Channel, run_id: str) -> None:
        # The generated constructor is typed for blocking channels.
        self._stub = async_stub(sample_grpc.SampleServiceStub, channel)
        self._runs = async_stub(run_grpc.RunServiceStub, channel)
        self._run_id = run_id
        self._trainer_id = uuid.uuid4().hex
        self._pending: frozenset[int] = frozenset()
        self._num_open_groups = 0
        self._leases: dict[int, str] = {}
        self.epoch = 0
        """Fencing number; 0 until `reconcile`."""
        self.newest_pending = 0
        """Newest step that an earlier trainer leased and none committed; 0 for none."""

    async def reconcile(self, step: int) -> None:
        """Fence older trainers and commit all steps up to `step`, that of the newest checkpoint."""
        request = sample_pb2.ReconcileRequest(
            run_id=self._run_id, step=step, trainer_id=self._trainer_id
        )
        response = await retry_forever("Reconcile", lambda: self._stub.Reconcile(request))
        self.epoch = response.epoch
        self._pending = frozenset(response.pending_steps) - {response.open_step}
        self.newest_pending = max(response.pending_steps, default=0)

    async def ledger_steps(self) -> tuple[int, int]:
        """The newest step that a trainer committed, and the newest that one leased."""
        request = sample_pb2.GetReadinessRequest(run_id=self._run_id)
        response = await retry_forever("GetReadiness", lambda: self._stub.GetReadiness(request))
        return response.readiness.committed_step, response.readiness.leased_step

    async def check_rules(
        self, algorithm: AlgorithmConfig, batch: BatchConfig
    ) -> Mapping[str, Collection[str]]:
        """Check that agents are held to the reward that is trained on, and that batches have tails.

        Returns:
            The names of rewards in settings of trainer and run, by setting.

        Raises:
            ConfigError: the run requires another reward, or generates ahead.
        """
        get = run_pb2.GetRunRequest(run_id=self._run_id)
        run = (await retry_forever("GetRun", lambda: self._runs.GetRun(get))).run
        if batch.start_at_tail and not batch.stream_groups and run.config.max_staleness:
            raise ConfigError(
                f"batch.start_at_tail is true, but run {self._run_id!r} has max_staleness "
                f"{run.config.max_staleness}: its nodes go on with the next batch and no tail is "
                "left over, so set it to false, or create the run with max_staleness 0"
            )
        required = run.config.reward_name
        trained = algorithm.reward_weights or {algorithm.trained_reward}
        if required and required not in trained:
            raise ConfigError(
                f"algorithm.reward is {algorithm.trained_reward!r}, and run {self._run_id!r} "
                f"requires the reward {required!r} of its rollouts: set it to that name, or create "
                "the run with another reward_name"
            )
        return {
            "algorithm.reward_weights": algorithm.reward_weights,
            "zero_variance_reward": {run.config.zero_variance_reward},
            "replay_reward_name": {run.config.replay.reward_name},
        }

    async def end_run(self) -> None:
        """End the run: agents get no more tasks, and learn why."""
        end = run_pb2.EndRunRequest(run_id=self._run_id)
        await retry_forever("EndRun", lambda: self._runs.EndRun(end))

    async def progress(
        self,
        step: int,
        base_weight_version: int,
        *,
        more_than: int = 0,
        wait_seconds: float = 0.0,
    ) -> BatchProgress:
        """The progress of the batch of `step`; blocks until more than `more_than` groups are ready.

        Blocks for at most `wait_seconds`. The base version also lets the manager admit rollouts
        of the following steps.
        """
        request = sample_pb2.AwaitStepRequest(
            run_id=self._run_id,
            epoch=self.epoch,
            step=step,
            base_weight_version=base_weight_version,
            min_ready_groups=max(more_than + 1 - self._num_open_groups, 0),
            wait=to_duration(wait_seconds),
        )
        timeout = wait_seconds + _MARGIN_SECONDS
        response = await retry_forever(
            "AwaitStep", lambda: self._stub.AwaitStep(request, timeout=timeout)
        )
        found = response.readiness
        self._num_open_groups = found.num_open_groups
        num_leasable = found.num_ready_groups - found.num_kept_back_groups
        return BatchProgress(num_leasable + found.num_open_groups, found.groups_per_step)

    async def lease(
        self, step: int, base_weight_version: int, min_groups: int = 0
    ) -> sample_pb2.LeaseSamplesResponse | None:
        """Lease the samples of `step` until `commit`; None if too few groups could be leased.

        A batch has all its groups or, if `min_groups` is not 0, at least that many. Samples are
        read page by page: a step may exceed the size of a message.
        """
        request = self._request(step, base_weight_version, _LEASE_POLL_SECONDS)
        request.min_groups = min_groups
        batch = await self._read_pages(request)
        if not batch.lease_token:
            return None
        self._leases[step] = batch.lease_token
        return batch

    async def lease_page(
        self,
        step: int,
        base_weight_version: int,
        first_sample: int,
        *,
        min_groups: int = 0,
        wait: bool = True,
    ) -> sample_pb2.LeaseSamplesResponse | None:
        """Lease samples of a streamed `step` from `first_sample` on; None if there are none yet.

        More may follow unless `next_sample` of the page is 0. The step ends with a full batch or,
        if `min_groups` is not 0, with at least that many groups.
        """
        request = self._request(step, base_weight_version, _LEASE_POLL_SECONDS * wait)
        request.first_sample, request.min_groups = first_sample, min_groups
        request.streaming = True
        page = await self._call_lease(request)
        if not page.lease_token:
            return None
        self._leases[step] = page.lease_token
        return page

    def _request(
        self, step: int, base_weight_version: int, wait_seconds: float
    ) -> sample_pb2.LeaseSamplesRequest:
        return sample_pb2.LeaseSamplesRequest(
            run_id=self._run_id,
            epoch=self.epoch,
            step=step,
            base_weight_version=base_weight_version,
            wait=to_duration(wait_seconds),
            max_bytes=_PAGE_BYTES,
        )

    async def _call_lease(
        self, request: sample_pb2.LeaseSamplesRequest
    ) -> sample_pb2.LeaseSamplesResponse:
        timeout = _LEASE_POLL_SECONDS + _MARGIN_SECONDS
        return await retry_forever(
            "LeaseSamples", lambda: self._stub.LeaseSamples(request, timeout=timeout)
        )

    async def _read_pages(
        self, request: sample_pb2.LeaseSamplesRequest
    ) -> sample_pb2.LeaseSamplesResponse:
        """All that a step has; `next_sample` is not 0 if it is open and waits for more."""
        batch = await self._call_lease(request)
        while batch.next_sample:
            request.first_sample = batch.next_sample
            page = await self._call_lease(request)
            if not page.lease_token:
                break
            batch.samples.extend(page.samples)
            batch.max_staleness = max(batch.max_staleness, page.max_staleness)
            batch.next_sample, batch.streamed = page.next_sample, page.streamed
        return batch

    def repeats(self, *steps: int) -> bool:
        """Whether each of `steps` was leased whole by an earlier trainer, and is trained again."""
        return self._pending.issuperset(steps)

    async def read_pending(self, step: int) -> sample_pb2.LeaseSamplesResponse:
        """What a step has that was leased before; it may wait for more."""
        request = self._request(step, 0, 0.0)
        request.streaming = True
        batch = await self._read_pages(request)
        if batch.lease_token and not batch.next_sample:
            self._leases[step] = batch.lease_token
            self._pending |= {step}  # whole now, if it was open before
        return batch

    async def reject(self, step: int, messages: Mapping[str, str]) -> None:
        """Take groups that cannot be trained out of `step`; `messages` by group say why.

        The step is to be leased again: it waits for others in their place.
        """
        request = sample_pb2.RejectGroupsRequest(run_id=self._run_id, epoch=self.epoch, step=step)
        for group_id, message in messages.items():
            request.groups.add(group_id=group_id, message=message[:_MAX_MESSAGE])
        response = await retry_forever("RejectGroups", lambda: self._stub.RejectGroups(request))
        if response.open:  # later steps went back to the queue
            self._pending = frozenset(each for each in self._pending if each < step)

    async def record_trained(
        self, step: int, samples: Sequence[trajectory_pb2.TrainedSample], num_kept_steps: int
    ) -> None:
        """Record for people what `step` trained on; the newest `num_kept_steps` are kept.

        Raises:
            SeamflowError: the manager refused it.
        """
        for page in _pages(samples):
            request = sample_pb2.RecordTrainedSamplesRequest(
                run_id=self._run_id,
                epoch=self.epoch,
                step=step,
                samples=page,
                num_kept_steps=num_kept_steps,
            )
            await retrying(lambda request=request: self._stub.RecordTrainedSamples(request))  # type: ignore[misc]

    async def commit(self, step: int) -> None:
        """Commit `step` and all before it: a durable checkpoint covers them."""
        request = sample_pb2.CommitStepRequest(run_id=self._run_id, epoch=self.epoch, step=step)
        await retry_forever("CommitStep", lambda: self._stub.CommitStep(request))
        self._leases = {leased: token for leased, token in self._leases.items() if leased > step}

    async def may_publish(self, weight_version: int) -> bool:
        """Whether publishing now makes no rollout in flight too old, or was postponed for long."""
        request = sample_pb2.AwaitPublishRequest(
            run_id=self._run_id, epoch=self.epoch, weight_version=weight_version
        )
        response = await retry_forever("AwaitPublish", lambda: self._stub.AwaitPublish(request))
        return bool(response.publish)

    async def keep_leases(self) -> None:
        """Extend the lease of every uncommitted step until cancelled."""
        while True:
            remaining = [await self._extend(step) for step in tuple(self._leases)]
            await asyncio.sleep(min([1.0, *(seconds / 3 for seconds in remaining)]))

    async def _extend(self, step: int) -> float:
        token = self._leases.get(step)
        if token is None:
            return float("inf")  # committed while another lease was extended
        request = sample_pb2.ExtendLeaseRequest(run_id=self._run_id, lease_token=token)
        try:
            response = await retry_forever("ExtendLease", lambda: self._stub.ExtendLease(request))
        except (PreconditionError, NotFoundError) as error:
            # Committed in the meantime, or expired; a repeated step leases the same samples.
            if self._leases.pop(step, None) is not None:
                get_logger().warning("lease_lost", step=step, error=str(error))
            return float("inf")
        return seconds_of(response.remaining)


def _pages(
    samples: Sequence[trajectory_pb2.TrainedSample],
) -> Iterator[list[trajectory_pb2.TrainedSample]]:
    """The samples in messages of bounded size."""
    page, num_bytes = list[trajectory_pb2.TrainedSample](), 0
    for sample in samples:
        page.append(sample)
        num_bytes += sample.ByteSize()
        if num_bytes >= _PAGE_BYTES or len(page) == _MAX_SAMPLES:
            yield page
            page, num_bytes = [], 0
    if page:
        yield page
