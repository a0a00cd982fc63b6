"""Periodic measurements of the node's workers, for heartbeats and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import grpc.aio
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from services.chassis import metrics
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
        """Measure, forever."""
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
