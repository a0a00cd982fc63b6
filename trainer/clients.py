"""Clients of the services a trainer calls. All calls are idempotent and retried until they succeed.

A trainer survives restarts of these services; it ends when a newer trainer has taken over
(`seamflow.errors.StaleEpochError`).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence

import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp
from seamflow.durations import seconds_of, to_duration
from seamflow.errors import NotFoundError, PreconditionError
from seamflow.pages import pages
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb2
from seamflow.scheduler.v1 import scheduler_service_pb2_grpc as scheduler_grpc
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import run_service_pb2 as run_pb2
from seamflow.trajectory.v1 import run_service_pb2_grpc as run_grpc
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb2
from seamflow.trajectory.v1 import sample_service_pb2_grpc as sample_grpc

from services.chassis.errors import ConfigError
from services.chassis.log import get_logger
from services.chassis.rpc.retries import retry_forever
from trainer.batch_progress import BatchProgress
from trainer.config import AlgorithmConfig, BatchConfig

__all__ = ["NodeClient", "SampleClient"]

_TAG, _ROLLOUT = "train", "rollout"
_POLL_SECONDS = 20.0
"""Longest duration of one long poll."""
_PAGE_BYTES = 1 << 20
_MAX_MESSAGE = 2048
_LEASE_POLL_SECONDS = 5.0
"""Shorter: during a lease poll the gang holds nodes that could be lent."""
_MARGIN_SECONDS = 15.0
"""Time after the end of a long poll at which an unanswered call is retried."""

_PASSED = Timestamp(seconds=1)
"""Passed on every clock: this machine's may be ahead of the scheduler's, and nodes that are needed
now would be needed later."""


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

    async def committed_step(self) -> int:
        """Newest step that a trainer committed."""
        request = sample_pb2.GetReadinessRequest(run_id=self._run_id)
        response = await retry_forever("GetReadiness", lambda: self._stub.GetReadiness(request))
        return int(response.readiness.committed_step)

    async def check_rules(self, algorithm: AlgorithmConfig, batch: BatchConfig) -> None:
        """Check that agents are held to the reward that is trained on, and that batches have tails.

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
        if step in self._pending:
            return BatchProgress(0, 0)
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
        batch = await self._call_lease(request)
        if not batch.lease_token:
            return None
        self._leases[step] = batch.lease_token
        request.first_sample = batch.next_sample
        while request.first_sample:
            page = await self._call_lease(request)
            batch.samples.extend(page.samples)
            batch.max_staleness = max(batch.max_staleness, page.max_staleness)
            request.first_sample = page.next_sample
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

    async def read_pending(self, step: int) -> sample_pb2.LeaseSamplesResponse:
        """What a step has that was leased before; it may wait for more."""
        request = self._request(step, 0, 0.0)
        request.streaming = True
        batch = page = await self._call_lease(request)
        samples = [*batch.samples]
        while page.samples and page.next_sample:
            request.first_sample = page.next_sample
            page = await self._call_lease(request)
            samples += page.samples
        if page.lease_token and not page.next_sample:
            self._pending |= {step}  # whole now, if it was open before
        return sample_pb2.LeaseSamplesResponse(samples=samples, num_deliveries=batch.num_deliveries)

    async def reject(self, step: int, messages: Mapping[str, str]) -> None:
        """Take groups that cannot be trained out of `step`; `messages` by group say why.

        The step is to be leased again: it waits for others in their place.
        """
        request = sample_pb2.RejectGroupsRequest(run_id=self._run_id, epoch=self.epoch, step=step)
        for group_id, message in messages.items():
            request.groups.add(group_id=group_id, message=message[:_MAX_MESSAGE])
        response = await retry_forever("RejectGroups", lambda: self._stub.RejectGroups(request))
        self._pending = self._pending - {step} if response.open else self._pending | {step}

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


class NodeClient:
    """Client of the scheduler: requests and releases the gang's nodes.

    Without a scheduler the trainer always holds them.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel | None,
        run_id: str,
        gang_id: str,
        num_nodes: int,
        rank_nodes: Sequence[str] = (),
    ) -> None:
        """`rank_nodes`: the node of each rank, requested by name; without names any are."""
        self._stub: scheduler_grpc.SchedulerServiceAsyncStub | None = (
            None if channel is None else async_stub(scheduler_grpc.SchedulerServiceStub, channel)
        )
        self._run_id, self._gang_id, self._num_nodes = run_id, gang_id, num_nodes
        self._node_ids = sorted(set(filter(None, rank_nodes)))
        self._requested = True
        self._batch = 0
        self._last_release = scheduler_pb2.ReleaseNodesRequest()
        self.return_seconds = 0.0
        """Time the slowest node needs to switch back to training; 0: not measured yet."""

    async def acquire(self, batch: int = 0) -> None:
        """Wait until the scheduler has granted all nodes for `batch`; 0: for the previous batch."""
        self._batch = batch or self._batch
        if self._stub is None:
            return
        while not await self._request(wait_seconds=_POLL_SECONDS):
            pass

    async def request_ahead(self) -> None:
        """Request the nodes before the batch is full; `acquire` follows.

        Does nothing unless other nodes generate: without them the batch would never become full.
        """
        if self._stub is not None and await self.others_generate():
            get_logger().info("nodes_requested_ahead", return_seconds=self.return_seconds)
            await self._request(is_ahead=True)

    async def release(
        self, batch: int = 0, forecast: scheduler_pb2.GenerationForecast | None = None
    ) -> int | None:
        """Release the nodes until they are requested for `batch`; 0: permanently.

        From `forecast` the scheduler decides whether to lend them, and when the tail of the batch
        begins: returns R_t, the rollouts that then remain; None: it does not know.
        """
        self._batch = batch
        self._last_release = scheduler_pb2.ReleaseNodesRequest(
            run_id=self._run_id, gang_id=self._gang_id, forecast=forecast, batch=batch
        )
        return await self.release_again()

    async def release_again(self) -> int | None:
        """Repeat the last `release` if the nodes were requested since."""
        if self._stub is None or not self._requested:
            return None
        stub, request = self._stub, self._last_release
        # Before the call: nodes requested during it have to be released again.
        self._requested = False
        response = await retry_forever("ReleaseNodes", lambda: stub.ReleaseNodes(request))
        return response.tail.remaining_rollouts if response.HasField("tail") else None

    async def _request(self, *, wait_seconds: float = 0.0, is_ahead: bool = False) -> bool:
        """Request the nodes once; whether all are granted."""
        stub = self._stub
        assert stub is not None
        self._requested = True
        request = scheduler_pb2.RequestNodesRequest(
            run_id=self._run_id,
            gang_id=self._gang_id,
            tag=_TAG,
            num_nodes=self._num_nodes,
            node_ids=self._node_ids,
            wait=to_duration(wait_seconds),
            batch=self._batch,
            needed_time=_PASSED if is_ahead else None,
        )
        timeout = wait_seconds + _MARGIN_SECONDS
        response = await retry_forever(
            "RequestNodes", lambda: stub.RequestNodes(request, timeout=timeout)
        )
        if response.nodes:
            self.return_seconds = max(
                seconds_of(node.switch_durations[_TAG]) for node in response.nodes
            )
        return response.granted

    async def others_generate(self) -> bool:
        """Whether groups still complete for this run while the gang holds its nodes.

        Others must roll out, and for each other tag, such as "score", there must be a node left.
        """
        if self._stub is None:
            return True  # the trainer shares no devices with rollout
        nodes = await self._list_nodes()
        # Nodes shared between runs may generate for another run.
        rolling_out = [
            node
            for node in nodes
            if node.assignment.tag == _ROLLOUT
            and (node.assignment.run_id or node.run_id) == self._run_id
        ]
        num_lent = sum(node.assignment.lent for node in rolling_out)
        tags = {tag for node in nodes for tag in node.capability_tags} - {_TAG, _ROLLOUT}
        return self._leaves(len(rolling_out), num_lent) and all(
            self._leaves(len(able), sum(_TAG in node.capability_tags for node in able))
            for tag in tags
            if (able := [node for node in nodes if tag in node.capability_tags])
        )

    def _leaves(self, number: int, num_takeable: int) -> bool:
        """Whether some of `number` nodes are left when the gang takes all it can of them."""
        return number - min(num_takeable, self._num_nodes) > 0

    async def _list_nodes(self) -> list[scheduler_pb2.Node]:
        stub = self._stub
        assert stub is not None
        request = scheduler_pb2.ListNodesRequest(run_id=self._run_id)

        async def nodes(page: scheduler_pb2.ListNodesRequest) -> scheduler_pb2.ListNodesResponse:
            return await retry_forever(
                "ListNodes", lambda: stub.ListNodes(page, timeout=_MARGIN_SECONDS)
            )

        return [node async for page in pages(nodes, request) for node in page.nodes]
