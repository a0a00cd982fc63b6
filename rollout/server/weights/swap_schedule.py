"""When a server that has new weights in its memory changes over to them.

At once, by default: at the next token boundary. `rolling`: when it is one of the few of its run
that change now (the weights service counts). `turn`: when the turns that ran have ended. Each wait
has a deadline, after which the change goes on: nothing here can hold weights back for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import grpc.aio
from seamflow.durations import seconds_of
from seamflow.retry import Backoff
from seamflow.weights.v1 import weight_service_pb2 as pb

from services.chassis import metrics
from services.chassis.log import get_logger

if TYPE_CHECKING:
    from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceAsyncStub

__all__ = ["RollingOrder", "RunningTurns", "SwapSchedule"]

_WAITS_EXPIRED = metrics.counter(
    "rollout_server",
    "weight_waits_expired_total",
    "Updates that went on because a wait for their boundary had lasted long enough.",
    ("wait",),
)
_CALL_SECONDS = 2.0
_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

T = TypeVar("T")


class RunningTurns:
    """The turns that run now."""

    def __init__(self) -> None:
        self._running: set[asyncio.Future[None]] = set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """A turn runs in this context."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running.add(turn)
        try:
            yield
        finally:
            self._running.discard(turn)
            turn.set_result(None)

    async def ended(self) -> None:
        """Wait for the turns that run now; later ones don't count."""
        if self._running:
            await asyncio.wait(set(self._running))


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingOrder:
    """A place among the servers that change weights, lent by the weights service."""

    stub: WeightServiceAsyncStub
    """The weights service."""
    run_id: str
    """Training job."""
    model: str
    """Model that is followed."""
    server_id: str
    """Who asks."""

    async def acquire(self) -> float:
        """Wait for a place, also while the weights service is silent: bound it. Its seconds.

        Raises `AioRpcError` for a refusal that asking again does not change.
        """
        request = pb.AcquireSwapRequest(
            run_id=self.run_id, model=self.model, server_id=self.server_id
        )
        backoff = Backoff(longest=0.5)
        while True:
            try:
                answer = await self.stub.AcquireSwap(request, timeout=_CALL_SECONDS)
                if answer.granted:
                    return seconds_of(answer.ttl)
            except grpc.aio.AioRpcError as error:
                if error.code() not in _SILENT:
                    raise
            await backoff.wait()

    async def keep(self, seconds: float) -> None:
        """Extend the place for as long as this runs, well before it expires."""
        with suppress(grpc.aio.AioRpcError):
            while True:
                await asyncio.sleep(seconds / 3)
                seconds = await self.acquire()

    async def release(self) -> None:
        """Give the place back; where that fails it expires."""
        request = pb.ReleaseSwapRequest(
            run_id=self.run_id, model=self.model, server_id=self.server_id
        )
        with suppress(grpc.aio.AioRpcError):
            await self.stub.ReleaseSwap(request, timeout=_CALL_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapSchedule:
    """What an update waits for."""

    turns: RunningTurns | None = None
    """Wait until the turns that run have ended; None: the next token will do."""
    order: RollingOrder | None = None
    """Wait for a place in this order; None: all servers change at once."""
    wait_seconds: float = 30.0
    """How long each of these waits may last."""

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Change weights in this context."""
        if self.turns is not None:
            await self._bounded("turn", self.turns.ended())
        if self.order is None:
            yield
            return
        keeping: asyncio.Task[None] | None = None
        try:
            seconds = await self._bounded("rolling", self.order.acquire())
            if seconds is not None:
                keeping = asyncio.create_task(self.order.keep(seconds))
            yield
        finally:
            if keeping is not None:
                keeping.cancel()
                await asyncio.wait({keeping})
            await self.order.release()

    async def _bounded(self, what: str, wait: Coroutine[object, object, T]) -> T | None:
        """What is waited for; None if it is not to be had."""
        try:
            async with asyncio.timeout(self.wait_seconds):
                return await wait
        except TimeoutError:
            reason = f"{self.wait_seconds:g} s have passed"
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        _WAITS_EXPIRED.labels(what).inc()
        get_logger().warning("weights_wait_ended", wait=what, reason=reason)
        return None
