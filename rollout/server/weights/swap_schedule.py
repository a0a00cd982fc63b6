"""When a server with prepared weights swaps to them.

By default at the next token boundary. `rolling`: when the weights service grants it one of the
run's swap slots. `turn`: when the turns running now have ended. Each wait has a timeout, after
which the swap proceeds.
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

_WAITS_EXPIRED = metrics.counter(
    "rollout_server",
    "weight_waits_expired_total",
    "Swaps that proceeded after the timeout or the failure of a wait.",
    ("wait",),
)
_CALL_SECONDS = 2.0
_SILENT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,  # by a service that ends
    grpc.StatusCode.DEADLINE_EXCEEDED,
)

T = TypeVar("T")


class RunningTurns:
    """The turns that are running."""

    def __init__(self) -> None:
        self._running: set[asyncio.Future[None]] = set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Register a turn for the duration of this context."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running.add(turn)
        try:
            yield
        finally:
            self._running.discard(turn)
            turn.set_result(None)

    async def ended(self) -> None:
        """Wait for the turns running now; later ones do not count."""
        if self._running:
            await asyncio.wait(set(self._running))


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingOrder:
    """A leased swap slot, granted by the weights service."""

    stub: WeightServiceAsyncStub
    """The weights service."""
    run_id: str
    """Training job."""
    model: str
    """Name of the model."""
    server_id: str
    """This server."""

    async def acquire(self) -> float:
        """Wait for a slot without a limit; returns the seconds of its lease.

        Raises `AioRpcError` for an error that a retry does not cure.
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
        """Extend the lease of `seconds` until cancelled."""
        with suppress(grpc.aio.AioRpcError):
            while True:
                await asyncio.sleep(seconds / 3)
                seconds = await self.acquire()

    async def release(self) -> None:
        """Release the slot; if that fails its lease expires."""
        request = pb.ReleaseSwapRequest(
            run_id=self.run_id, model=self.model, server_id=self.server_id
        )
        with suppress(grpc.aio.AioRpcError):
            await self.stub.ReleaseSwap(request, timeout=_CALL_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapSchedule:
    """What a swap waits for."""

    turns: RunningTurns | None = None
    """Wait until the running turns have ended; None: swap at the next token."""
    order: RollingOrder | None = None
    """Wait for a slot; None: all servers swap concurrently."""
    wait_seconds: float = 30.0
    """Timeout of each wait."""

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Swap weights in this context."""
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
        """The result of `wait`; None after the timeout or an error."""
        try:
            async with asyncio.timeout(self.wait_seconds):
                return await wait
        except TimeoutError:
            reason = f"timeout after {self.wait_seconds:g} s"
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        _WAITS_EXPIRED.labels(what).inc()
        get_logger().warning("weights_wait_ended", wait=what, reason=reason)
        return None
