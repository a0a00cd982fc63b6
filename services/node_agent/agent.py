"""The node agent: registers, reports, and lets the switcher do what the scheduler says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
from services.node_agent.activities import Role
from services.node_agent.lease import Lease
from services.node_agent.measurements import Reporter
from services.node_agent.switcher import Order, Standing, Switcher

__all__ = ["NodeAgent"]

_ANSWER_SECONDS = 5.0
_PAUSE_SECONDS = 0.2
_LEAST_SECONDS = 0.05
_UNKNOWN_TO_SCHEDULER = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ABORTED)
_WORTH_RETRYING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INTERNAL,
)


class NodeAgent:
    """One node's side of the scheduler's contract.

    It fences itself: when no heartbeat was answered for a lease, counted from *sending*, it stops
    all work, because the scheduler may soon give that work to others. Exempt is a node that can
    only roll out: no gang can be waiting for its device, and every token it generates is fenced by
    its turn's epoch, so an outage of the scheduler does not stop generation there.

    Args:
        registration: what the node says of itself.
        scheduler: channel to the scheduler.
        switcher: moves the workers.
        reporter: measures them.
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
        self._told: Standing | None = None
        self._is_fenced = True  # until the first lease begins
        self._is_leaving = False
        self._was_answered = True
        self.registered = asyncio.Event()
        """Set while the scheduler knows this node."""
        self._fenced = metrics.counter(
            "node_agent", "fenced_total", "Times the lease ran out and all work was stopped."
        )

    async def run(self) -> None:
        """Register, heartbeat, switch; when the lease is lost: fence, and register again."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._switcher.run())
            tasks.create_task(self._reporter.run())
            while not self._is_leaving:
                await self._register()
                while self.registered.is_set():
                    await self._heartbeat()
                    self._fence_if_due()

    async def drain(self) -> None:
        """Tell the scheduler that the node leaves, let work in flight go on elsewhere, and stop.

        Every report from now on says DRAINING.
        """
        self._is_leaving = True
        await asyncio.gather(self._tell_leaving(), self._switcher.leave(self._known_epoch))

    def lease_ran_out(self) -> bool:
        """True when the node may no longer work; never for one that can only roll out."""
        exempt = list(self._registration.capability_tags) == ["rollout"]
        return not exempt and self._lease.remaining <= 0

    async def _register(self) -> None:
        """Join the pool under a new epoch, however long it takes.

        Raises:
            DependencyUnavailable: the scheduler will never take this node as it is.
        """
        while not (self.registered.is_set() or self._is_leaving):
            self._fence_if_due()
            sent = self._clock()
            try:
                answer = await self._scheduler.RegisterNode(
                    self._registration, timeout=self._patience(_ANSWER_SECONDS)
                )
            except grpc.aio.AioRpcError as error:
                if error.code() not in _WORTH_RETRYING:
                    raise DependencyUnavailable("scheduler", error.details() or "") from error
                get_logger().warning("scheduler_unreachable", code=error.code().name)
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                self._lease.begin(sent, seconds_of(answer.lease_duration))
                self._is_fenced = False
                self.registered.set()
                self._follow(answer.assignment)

    async def _heartbeat(self) -> None:
        """Report once. A report is cut short as soon as there is something new to report."""
        self._switcher.moved.clear()
        sent, standing = self._clock(), self._switcher.standing
        third = self._lease.seconds / 3
        # A scheduler that was away may soon be again: the lease is renewed before news are awaited.
        report = self._report(standing, third if self._was_answered else 0.0)
        answer = asyncio.create_task(self._answer(report, timeout=self._patience(2 * third)))
        moved = asyncio.create_task(self._switcher.moved.wait())
        try:
            await asyncio.wait({answer, moved}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                assignment = answer.result()
                self._lease.renew(sent)
                self._was_answered = True
                self._told = standing
                self._follow(assignment)
        except grpc.aio.AioRpcError as error:
            await self._unanswered(error)
        finally:
            answer.cancel()
            moved.cancel()
            await asyncio.gather(answer, moved, return_exceptions=True)

    async def _tell_leaving(self) -> None:
        report = self._report(self._switcher.standing, wait=0.0)
        with suppress(grpc.aio.AioRpcError):
            self._follow(await self._answer(report, timeout=_ANSWER_SECONDS))

    async def _answer(self, report: pb.HeartbeatRequest, timeout: float) -> pb.Assignment:
        response = await self._scheduler.Heartbeat(report, timeout=timeout)
        return response.assignment

    def _patience(self, limit: float) -> float:
        """Seconds to wait for an answer: never beyond the lease, so that fencing is on time."""
        remaining = self._lease.remaining
        return min(limit, max(remaining, _LEAST_SECONDS)) if remaining > 0 else limit

    async def _unanswered(self, error: grpc.aio.AioRpcError) -> None:
        self._was_answered = False
        if error.code() in _UNKNOWN_TO_SCHEDULER:
            get_logger().warning("registration_void", error=error.details())
            self.registered.clear()
        elif error.code() in _WORTH_RETRYING:
            get_logger().warning("scheduler_unreachable", code=error.code().name)
            await asyncio.sleep(_PAUSE_SECONDS)
        else:
            raise error

    def _report(self, standing: Standing, wait: float) -> pb.HeartbeatRequest:
        if self._is_leaving:
            standing = Standing(pb.NODE_STATE_DRAINING, self._known_epoch)
        return pb.HeartbeatRequest(
            node_id=self._registration.node_id,
            state=standing.state,
            reported_epoch=standing.epoch,
            switch_seconds=None if standing is self._told else standing.switch_seconds,
            known_epoch=self._known_epoch,
            wait=to_duration(wait),
            report=self._reporter.latest,
        )

    def _follow(self, assignment: pb.Assignment) -> None:
        # A lower epoch can only come from a scheduler that another has replaced.
        if assignment.epoch >= self._known_epoch:
            self._known_epoch = assignment.epoch
            role = Role(assignment.tag, assignment.run_id or self._registration.run_id)
            has_work = bool(assignment.tag) and not self._is_leaving
            self._switcher.follow(Order(role if has_work else None, assignment.epoch))

    def _fence_if_due(self) -> None:
        if self._is_fenced or not self.lease_ran_out():
            return
        get_logger().warning("fenced", node_id=self._registration.node_id, epoch=self._known_epoch)
        self._fenced.inc()
        self._is_fenced = True
        self.registered.clear()
        self._switcher.follow(Order(None, self._known_epoch))
