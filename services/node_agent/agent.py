"""The node agent: registers, sends heartbeats, and passes assignments to the switcher."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import grpc
import grpc.aio
from seamflow.durations import seconds_of, to_duration
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from seamflow.stubs import async_stub

from services.chassis import metrics
from services.chassis.errors import DependencyUnavailable
from services.chassis.log import get_logger
from services.node_agent.switcher import NodeStatus, Order, Switcher
from services.node_agent.worker_clients import Activity, Role, WorkerStatus


class Reporter:
    """Polls all workers concurrently; one that does not answer is left out.

    Args:
        activities: by role.
        host_bytes: measures the worker processes.
        seconds: pause between two rounds.
    """

    def __init__(
        self,
        activities: Mapping[Role, Activity],
        host_bytes: Callable[[], Awaitable[int]],
        seconds: float,
    ) -> None:
        self._activities = activities
        self._host_bytes = host_bytes
        self._seconds = seconds
        self.latest: pb.NodeReport | None = None
        """The newest measurement; None before the first."""
        self._device = metrics.gauge(
            "node_agent", "used_device_bytes", "Device memory in use, as reported by the workers."
        )
        self._host = metrics.gauge(
            "node_agent", "used_host_bytes", "Host memory of the supervised worker processes."
        )

    async def run(self) -> None:
        while True:
            self.latest = await self._measure()
            self._device.set(self.latest.used_device_bytes)
            self._host.set(self.latest.used_host_bytes)
            await asyncio.sleep(self._seconds)

    async def _measure(self) -> pb.NodeReport:
        asked = [_answer(activity) for activity in self._activities.values()]
        found = [status for status in await asyncio.gather(*asked) if status is not None]
        return pb.NodeReport(
            used_device_bytes=sum(status.used_device_bytes for status in found),
            num_turns=sum(status.num_turns for status in found),
            tokens_per_second=sum(status.tokens_per_second for status in found),
            used_host_bytes=await self._host_bytes(),
            max_running=sum(status.max_running for status in found),
        )


async def _answer(activity: Activity) -> WorkerStatus | None:
    try:
        return await activity.status()
    except grpc.aio.AioRpcError:
        return None


class Lease:
    """Lease, counted from *sending* an answered request, so it ends before the scheduler's.

    Args:
        clock: monotonic seconds; must advance while the process is frozen.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._end = clock()
        self.seconds = 0.0
        """Its duration, set by the scheduler at registration."""

    def begin(self, sent: float, seconds: float) -> None:
        """The registration sent at `sent` was answered with a lease of `seconds`."""
        self.seconds = seconds
        self._end = sent + seconds

    def renew(self, sent: float) -> None:
        """The heartbeat sent at `sent` was answered."""
        self._end = sent + self.seconds

    @property
    def remaining(self) -> float:
        """Seconds left; at most 0 when it has expired."""
        return self._end - self._clock()


_ANSWER_SECONDS = 5.0
_RETRY_SECONDS = 0.2
_MIN_TIMEOUT_SECONDS = 0.05
_UNKNOWN_TO_SCHEDULER = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ABORTED)
_RETRYABLE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,  # by a scheduler that ends
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INTERNAL,
)


class NodeAgent:
    """One node's side of the scheduler's contract.

    It fences itself: when its lease expires, counted from *sending* the last answered heartbeat, it
    stops all work, because the scheduler may reassign it. A node that can only roll out is exempt:
    no gang can be waiting for its device, and its tokens are fenced by the epochs of their turns,
    so generation survives an outage of the scheduler.

    Args:
        registration: description of the node.
        scheduler: channel to the scheduler.
        switcher: switches the workers.
        reporter: measures the workers.
        lease: shared with the switcher's `may_activate`.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        registration: pb.RegisterNodeRequest,
        scheduler: grpc.aio.Channel,
        switcher: Switcher,
        reporter: Reporter,
        lease: Lease,
        clock: Callable[[], float],
    ) -> None:
        self._registration = registration
        self._scheduler = async_stub(SchedulerServiceStub, scheduler)
        self._switcher = switcher
        self._reporter = reporter
        self._lease = lease
        self._clock = clock
        self._known_epoch = 0
        self._reported_status: NodeStatus | None = None
        self._is_fenced = True  # until the first lease begins
        self._is_draining = False
        self._is_scheduler_available = True
        self.registered = asyncio.Event()
        """Set while the scheduler knows this node."""
        self._fenced = metrics.counter(
            "node_agent", "fenced_total", "Times the lease expired and all work was stopped."
        )

    async def run(self) -> None:
        """Register, heartbeat, switch; when the lease expires: fence, and register again."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._switcher.run())
            tasks.create_task(self._reporter.run())
            while not self._is_draining:
                await self._register()
                while self.registered.is_set():
                    await self._heartbeat()
                    self._fence_if_due()

    async def drain(self) -> None:
        """Report DRAINING, hand work in flight over to other nodes, and stop all workers.

        All further heartbeats report DRAINING.
        """
        self._is_draining = True
        await asyncio.gather(self._report_draining(), self._switcher.drain(self._known_epoch))

    def lease_expired(self) -> bool:
        """Whether the lease has expired; never for a node that can only roll out."""
        exempt = list(self._registration.capability_tags) == ["rollout"]
        return not exempt and self._lease.remaining <= 0

    async def _register(self) -> None:
        """Register with the scheduler; retries until it succeeds.

        Raises:
            DependencyUnavailable: the scheduler rejects the registration permanently.
        """
        while not (self.registered.is_set() or self._is_draining):
            self._fence_if_due()
            sent = self._clock()
            try:
                answer = await self._scheduler.RegisterNode(
                    self._registration, timeout=self._call_timeout(_ANSWER_SECONDS)
                )
            except grpc.aio.AioRpcError as error:
                if error.code() not in _RETRYABLE:
                    raise DependencyUnavailable("scheduler", error.details() or "") from error
                get_logger().warning("scheduler_unreachable", code=error.code().name)
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                self._lease.begin(sent, seconds_of(answer.lease_duration))
                self._is_fenced = False
                self.registered.set()
                self._apply(answer.assignment)

    async def _heartbeat(self) -> None:
        """Send one heartbeat, a long poll that is cancelled when the status changes."""
        self._switcher.status_changed.clear()
        sent, status = self._clock(), self._switcher.status
        third = self._lease.seconds / 3
        # After an outage the lease is renewed first, without a long poll.
        report = self._report(status, third if self._is_scheduler_available else 0.0)
        answer = asyncio.create_task(self._send(report, timeout=self._call_timeout(2 * third)))
        status_changed = asyncio.create_task(self._switcher.status_changed.wait())
        try:
            await asyncio.wait({answer, status_changed}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                assignment = answer.result()
                self._lease.renew(sent)
                self._is_scheduler_available = True
                self._reported_status = status
                self._apply(assignment)
        except grpc.aio.AioRpcError as error:
            await self._handle_error(error)
        finally:
            answer.cancel()
            status_changed.cancel()
            await asyncio.gather(answer, status_changed, return_exceptions=True)

    async def _report_draining(self) -> None:
        report = self._report(self._switcher.status, wait=0.0)
        with suppress(grpc.aio.AioRpcError):
            self._apply(await self._send(report, timeout=_ANSWER_SECONDS))

    async def _send(self, report: pb.HeartbeatRequest, timeout: float) -> pb.Assignment:
        response = await self._scheduler.Heartbeat(report, timeout=timeout)
        return response.assignment

    def _call_timeout(self, limit: float) -> float:
        """Timeout of a call: at most the rest of the lease, so that fencing is on time."""
        remaining = self._lease.remaining
        return min(limit, max(remaining, _MIN_TIMEOUT_SECONDS)) if remaining > 0 else limit

    async def _handle_error(self, error: grpc.aio.AioRpcError) -> None:
        self._is_scheduler_available = False
        if error.code() in _UNKNOWN_TO_SCHEDULER:
            get_logger().warning("registration_lost", error=error.details())
            self.registered.clear()
        elif error.code() in _RETRYABLE:
            get_logger().warning("scheduler_unreachable", code=error.code().name)
            await asyncio.sleep(_RETRY_SECONDS)
        else:
            raise error

    def _report(self, status: NodeStatus, wait: float) -> pb.HeartbeatRequest:
        if self._is_draining:
            status = NodeStatus(pb.NODE_STATE_DRAINING, self._known_epoch)
        is_new = status is not self._reported_status and status.switch_seconds is not None
        return pb.HeartbeatRequest(
            node_id=self._registration.node_id,
            state=status.state,
            reported_epoch=status.epoch,
            switch_duration=to_duration(status.switch_seconds or 0.0) if is_new else None,
            known_epoch=self._known_epoch,
            wait=to_duration(wait),
            report=self._reporter.latest,
        )

    def _apply(self, assignment: pb.Assignment) -> None:
        # A lower epoch can only come from a scheduler that has been replaced.
        if assignment.epoch >= self._known_epoch:
            self._known_epoch = assignment.epoch
            role = Role(assignment.tag, assignment.run_id or self._registration.run_id)
            has_work = bool(assignment.tag) and not self._is_draining
            self._switcher.set_order(Order(role if has_work else None, assignment.epoch))

    def _fence_if_due(self) -> None:
        if self._is_fenced or not self.lease_expired():
            return
        get_logger().warning("fenced", node_id=self._registration.node_id, epoch=self._known_epoch)
        self._fenced.inc()
        self._is_fenced = True
        self.registered.clear()
        self._switcher.set_order(Order(None, self._known_epoch))
