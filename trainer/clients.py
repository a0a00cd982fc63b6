"""The services a trainer calls, each call repeated until it gets through: all are idempotent.

A trainer outlives restarts of the services around it; it ends when a newer trainer has taken over
(`seamflow.errors.StaleEpochError`).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc.aio
from seamflow.durations import seconds_of, to_duration, to_timestamp
from seamflow.errors import DeadlineError, NotFoundError, PreconditionError, SeamflowError
from seamflow.retry import retrying
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb2
from seamflow.scheduler.v1 import scheduler_service_pb2_grpc as scheduler_grpc
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb2
from seamflow.trajectory.v1 import sample_service_pb2_grpc as sample_grpc

from services.chassis.log import get_logger
from trainer.batch_forecast import Readiness

__all__ = ["Nodes", "Samples", "persistently"]

_TAG = "train"
_POLL_SECONDS = 20.0
"""How long one long-poll may last."""
_PAGE_BYTES = 1 << 20
_LEASE_POLL_SECONDS = 5.0
"""Shorter: meanwhile the gang holds nodes that could be lent."""
_MARGIN_SECONDS = 15.0
"""Time beyond a long-poll's own after which the peer counts as frozen."""

T = TypeVar("T")


async def persistently(what: str, call: Callable[[], Awaitable[T]]) -> T:
    """Repeat an idempotent call while its service is away, frozen or busy, saying so in the log."""

    def report(error: SeamflowError) -> None:
        get_logger().warning("call_repeated", call=what, error=str(error))

    while True:
        try:
            return await retrying(call, on_retry=report)
        except DeadlineError as error:
            report(error)


class Samples:
    """The trajectory manager's SampleService for one start of one trainer."""

    def __init__(self, channel: grpc.aio.Channel, run_id: str) -> None:
        # The generated constructor is typed for blocking channels.
        self._stub = async_stub(sample_grpc.SampleServiceStub, channel)
        self._run_id = run_id
        self._trainer_id = uuid.uuid4().hex
        self._pending: frozenset[int] = frozenset()
        self._num_open_groups = 0
        self._leases: dict[int, bytes] = {}
        self.epoch = 0
        """Fencing number; 0 until `reconcile`."""

    async def reconcile(self, step: int) -> None:
        """Take over from any older trainer; the newest durable checkpoint covers `step`."""
        request = sample_pb2.ReconcileRequest(
            run_id=self._run_id, step=step, trainer_id=self._trainer_id
        )
        response = await persistently("Reconcile", lambda: self._stub.Reconcile(request))
        self.epoch = response.epoch
        self._pending = frozenset(response.pending_steps) - {response.open_step}

    async def ready(
        self,
        step: int,
        base_weight_version: int,
        *,
        more_than: int = 0,
        wait_seconds: float = 0.0,
    ) -> Readiness:
        """How far the batch of `step` is; waits a while until it is further than `more_than`.

        Admission goes by the weights that the step starts from: rollouts begin for the steps after.
        """
        if step in self._pending:
            return Readiness(0, 0)
        request = sample_pb2.GetReadinessRequest(
            run_id=self._run_id,
            min_ready_groups=max(more_than + 1 - self._num_open_groups, 0),
            wait=to_duration(wait_seconds),
            epoch=self.epoch,
            step=step,
            base_weight_version=base_weight_version,
        )
        timeout = wait_seconds + _MARGIN_SECONDS
        response = await persistently(
            "GetReadiness", lambda: self._stub.GetReadiness(request, timeout=timeout)
        )
        self._num_open_groups = response.num_open_groups
        num_leasable = response.num_ready_groups - response.num_kept_back_groups
        return Readiness(num_leasable + response.num_open_groups, response.groups_per_step)

    async def lease(
        self, step: int, base_weight_version: int, min_groups: int = 0
    ) -> sample_pb2.LeaseSamplesResponse | None:
        """The samples of `step`, kept until `commit`; None if too few were fit to be leased.

        Too few for a whole batch; or, if that is not 0, for `min_groups` of its groups.
        They come page by page: a step may be larger than a message.
        """
        request = self._request(step, base_weight_version, _LEASE_POLL_SECONDS)
        request.min_groups = min_groups
        whole = await self._page(request)
        if not whole.lease_token:
            return None
        self._leases[step] = whole.lease_token
        request.first_sample = whole.next_sample
        while request.first_sample:
            page = await self._page(request)
            whole.samples.extend(page.samples)
            whole.max_staleness = max(whole.max_staleness, page.max_staleness)
            request.first_sample = page.next_sample
        return whole

    async def stream(
        self,
        step: int,
        base_weight_version: int,
        first_sample: int,
        *,
        min_groups: int = 0,
        wait: bool = True,
    ) -> sample_pb2.LeaseSamplesResponse | None:
        """A page of what `step` has from `first_sample` on; None if there is nothing yet.

        More follows, or may, unless its `next_sample` is 0. The step takes groups until it has a
        batch, or once it has `min_groups` if that is not 0.
        """
        request = self._request(step, base_weight_version, _LEASE_POLL_SECONDS * wait)
        request.first_sample, request.min_groups = first_sample, min_groups
        request.streaming = True
        page = await self._page(request)
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
            packed=True,
            max_bytes=_PAGE_BYTES,
        )

    async def _page(
        self, request: sample_pb2.LeaseSamplesRequest
    ) -> sample_pb2.LeaseSamplesResponse:
        timeout = _LEASE_POLL_SECONDS + _MARGIN_SECONDS
        return await persistently(
            "LeaseSamples", lambda: self._stub.LeaseSamples(request, timeout=timeout)
        )

    async def commit(self, step: int) -> None:
        """Tell that a durable checkpoint covers `step` and all before it."""
        request = sample_pb2.CommitStepRequest(run_id=self._run_id, epoch=self.epoch, step=step)
        await persistently("CommitStep", lambda: self._stub.CommitStep(request))
        self._leases = {leased: token for leased, token in self._leases.items() if leased > step}

    async def may_publish(self, weight_version: int) -> bool:
        """Whether publishing now makes no work in flight too old, or has waited long enough."""
        request = sample_pb2.AwaitPublishRequest(
            run_id=self._run_id, epoch=self.epoch, weight_version=weight_version
        )
        response = await persistently("AwaitPublish", lambda: self._stub.AwaitPublish(request))
        return bool(response.publish)

    async def keep_leases(self) -> None:
        """Extend every uncommitted lease for as long as the trainer lives."""
        while True:
            remaining = [await self._extend(step) for step in tuple(self._leases)]
            await asyncio.sleep(min([1.0, *(seconds / 3 for seconds in remaining)]))

    async def _extend(self, step: int) -> float:
        token = self._leases.get(step)
        if token is None:
            return float("inf")  # committed while another one was extended
        request = sample_pb2.ExtendLeaseRequest(run_id=self._run_id, lease_token=token)
        try:
            response = await persistently("ExtendLease", lambda: self._stub.ExtendLease(request))
        except (PreconditionError, NotFoundError) as error:
            # Committed meanwhile, or expired. The ledger gives a repeated step the same samples.
            if self._leases.pop(step, None) is not None:
                get_logger().warning("lease_lost", step=step, error=str(error))
            return float("inf")
        return seconds_of(response.remaining)


class Nodes:
    """The gang's nodes, asked for and given back; without a scheduler they are always ours."""

    def __init__(
        self, channel: grpc.aio.Channel | None, run_id: str, gang_id: str, num_nodes: int
    ) -> None:
        self._stub: scheduler_grpc.SchedulerServiceAsyncStub | None = (
            None if channel is None else async_stub(scheduler_grpc.SchedulerServiceStub, channel)
        )
        self._run_id, self._gang_id, self._num_nodes = run_id, gang_id, num_nodes
        self._asked = True
        self._batch = 0
        self._released = scheduler_pb2.ReleaseNodesRequest()
        self.return_seconds = 0.0
        """What the slowest node needs to come back, as the scheduler knows it; 0: not measured."""

    async def acquire(self, batch: int = 0) -> None:
        """Wait until the scheduler has granted all nodes for `batch`; 0: for the same as before."""
        self._batch = batch or self._batch
        if self._stub is None:
            return
        while not await self._request(wait_seconds=_POLL_SECONDS):
            pass

    async def ask_ahead(self, needed_time: float) -> None:
        """Let the nodes come back from `needed_time` on, seconds since 1970; `acquire` follows.

        Nothing is asked while no other node would go on generating: what the gang waits for would
        never come.
        """
        if self._stub is not None and await self.others_generate():
            get_logger().info("nodes_asked_ahead", return_seconds=self.return_seconds)
            await self._request(needed_time=needed_time)

    async def release(self, batch: int = 0, outlook: scheduler_pb2.Outlook | None = None) -> None:
        """Give the nodes back until they are wanted for `batch`; 0: for good.

        By `outlook` it is judged who uses them.
        """
        self._batch = batch
        self._released = scheduler_pb2.ReleaseNodesRequest(
            run_id=self._run_id, gang_id=self._gang_id, outlook=outlook, batch=batch
        )
        await self.give_back()

    async def give_back(self) -> None:
        """Once more, as by the last `release`, though they were asked for since."""
        if self._stub is None or not self._asked:
            return
        stub, request = self._stub, self._released
        self._asked = False  # before the call: whoever asks meanwhile has them to give back again
        await persistently("ReleaseNodes", lambda: stub.ReleaseNodes(request))

    async def _request(
        self, *, wait_seconds: float = 0.0, needed_time: float | None = None
    ) -> bool:
        """Ask once; whether all nodes are granted."""
        stub = self._stub
        assert stub is not None
        self._asked = True
        request = scheduler_pb2.RequestNodesRequest(
            run_id=self._run_id,
            gang_id=self._gang_id,
            tag=_TAG,
            num_nodes=self._num_nodes,
            wait=to_duration(wait_seconds),
            batch=self._batch,
            needed_time=None if needed_time is None else to_timestamp(needed_time),
        )
        timeout = wait_seconds + _MARGIN_SECONDS
        response = await persistently(
            "RequestNodes", lambda: stub.RequestNodes(request, timeout=timeout)
        )
        if response.nodes:
            self.return_seconds = max(node.switch_seconds[_TAG] for node in response.nodes)
        return response.granted

    async def others_generate(self) -> bool:
        """Whether groups go on coming while the gang has its nodes."""
        if self._stub is None:
            return True  # the gang has devices of its own
        stub = self._stub
        request = scheduler_pb2.ListNodesRequest(run_id=self._run_id)
        response = await persistently(
            "ListNodes", lambda: stub.ListNodes(request, timeout=_MARGIN_SECONDS)
        )
        # Of the nodes that this run shares with others, some generate for those.
        rolling_out = [
            node
            for node in response.nodes
            if node.assignment.tag == "rollout"
            and (node.assignment.run_id or node.run_id) == self._run_id
        ]
        num_lent = sum(node.assignment.lent for node in rolling_out)
        return len(rolling_out) - min(num_lent, self._num_nodes) > 0
