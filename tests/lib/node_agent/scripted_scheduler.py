"""A scheduler whose assignments are set by a test, and which records the node agent's reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from seamflow.durations import seconds_of
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import (
    SchedulerServiceServicer,
    add_SchedulerServiceServicer_to_server,
)

from services.chassis.config.settings import ServerConfig
from services.chassis.rpc.server import Service, started


class ScriptedScheduler(SchedulerServiceServicer):
    """Knows one node, and never marks it as lost.

    Args:
        lease_seconds: duration of the node's lease.
        tag: first assignment of the node.
    """

    def __init__(self, lease_seconds: int = 5, tag: str = "") -> None:
        self._lease_seconds = lease_seconds
        self.is_away = False
        """It has forgotten the node, and takes none."""
        self.refusal = grpc.StatusCode.UNAVAILABLE
        """Answer to a registration while it is away."""
        self.num_refused = 0
        """Calls answered while it was away."""
        self.assignment = pb.Assignment(tag=tag, epoch=1)
        self.registrations: list[pb.RegisterNodeRequest] = []
        self.reports: list[pb.HeartbeatRequest] = []
        self._changed = asyncio.Event()

    async def assign(self, tag: str, run_id: str = "") -> int:
        """Assign `tag` to the node once it is registered; returns the epoch."""
        while not self.registrations:
            await self._changed.wait()
        return self._renew(tag, run_id)

    async def until(self, condition: Callable[[pb.HeartbeatRequest], object]) -> None:
        """Wait for a new report for which `condition` holds."""
        seen = len(self.reports)
        while not any(condition(report) for report in self.reports[seen:]):
            await self._changed.wait()

    async def until_refused(self, count: int) -> None:
        """Wait until so many calls were refused while it was away."""
        while self.num_refused < count:
            await self._changed.wait()

    async def until_active(self, epoch: int | None = None) -> None:
        """Wait until assignment `epoch` is active on the node; None: the newest."""

        def is_active(report: pb.HeartbeatRequest) -> bool:
            wanted = self.assignment.epoch if epoch is None else epoch
            return (report.state, report.reported_epoch) == (pb.NODE_STATE_ACTIVE, wanted)

        await self.until(is_active)

    async def RegisterNode(
        self, request: pb.RegisterNodeRequest, context: Any
    ) -> pb.RegisterNodeResponse:
        """Under a new epoch."""
        if self.is_away:
            await self._refuse(self.refusal, context)
        self.registrations.append(request)
        self._renew(self.assignment.tag, self.assignment.run_id)
        return pb.RegisterNodeResponse(
            assignment=self.assignment, lease_duration=Duration(seconds=self._lease_seconds)
        )

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        """Long-poll."""
        if self.is_away:
            await self._refuse(grpc.StatusCode.ABORTED, context)
        self.reports.append(request)
        self._wake()
        try:
            async with asyncio.timeout(seconds_of(request.wait)):
                while request.known_epoch == self.assignment.epoch:
                    await self._changed.wait()
        except TimeoutError:
            pass
        return pb.HeartbeatResponse(assignment=self.assignment)

    async def _refuse(self, code: grpc.StatusCode, context: Any) -> None:
        self.num_refused += 1
        self._wake()
        await context.abort(code, "away")

    def _renew(self, tag: str, run_id: str) -> int:
        epoch = self.assignment.epoch + 1
        self.assignment = pb.Assignment(tag=tag, run_id=run_id, epoch=epoch)
        self._wake()
        return epoch

    def _wake(self) -> None:
        news, self._changed = self._changed, asyncio.Event()
        news.set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        """Serve; gives the port."""
        servicers = [(add_SchedulerServiceServicer_to_server, self)]
        config = ServerConfig(port=0, drain_seconds=0.1)
        async with started(Service(servicers=servicers), config) as port:
            yield port
