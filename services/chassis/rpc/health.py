"""Readiness, for gRPC health checks and /readyz."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

from services.chassis.log import get_logger

_CHECK_SECONDS = 2.0
_INTERVAL_SECONDS = 1.0


class Health:
    """NOT_SERVING -> SERVING -> NOT_SERVING ..., moved by `check`; `drain` ends it in NOT_SERVING.

    Args:
        names: full names of the gRPC services, in addition to "" for the whole process.
        ready: whether the dependencies are available; None means always.
    """

    def __init__(self, names: Sequence[str], ready: Callable[[], Awaitable[bool]] | None) -> None:
        self.servicer = _Servicer()
        self._names = ("", *names)
        self._ready = ready
        self._last: bool | None = None
        self._draining = False

    async def check(self) -> bool:
        """Check the dependencies now; publish and return the result."""
        answer = not self._draining and await self._ask()
        if answer is not self._last:
            self._last = answer
            get_logger().info("ready" if answer else "not_ready")
            await self._publish(answer)
        return answer

    async def watch(self) -> None:
        """Check once a second until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_SECONDS)
            await self.check()

    async def drain(self) -> None:
        """Report NOT_SERVING permanently."""
        self._draining = True
        await self.servicer.enter_graceful_shutdown()
        self.servicer.drained.set()

    async def _ask(self) -> bool:
        if self._ready is None:
            return True
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                return await self._ready()
        except Exception as error:
            # A check that fails counts as not ready; liveness is not affected.
            get_logger().warning("readiness_check_failed", error=repr(error))
            return False

    async def _publish(self, serving: bool) -> None:
        states = health_pb2.HealthCheckResponse
        for name in self._names:
            await self.servicer.set(name, states.SERVING if serving else states.NOT_SERVING)


class _Servicer(HealthServicer):  # type: ignore[misc]
    """Ends its watches when the process drains; they would otherwise block it until the timeout."""

    def __init__(self) -> None:
        super().__init__()
        self.drained = asyncio.Event()

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802 -- the contract's name
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(super().Watch(request, context))
            await self.drained.wait()
            watch.cancel()
