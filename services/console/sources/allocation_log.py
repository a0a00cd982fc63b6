"""The scheduler's audit log of a run, followed while somebody looks."""

from __future__ import annotations

import asyncio
import time
from collections import deque

import grpc
import grpc.aio
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from services.console.sources.run_store import RunStore

_MAX_EVENTS = 20_000
_FIRST_SECONDS, _QUIET_SECONDS = 1.0, 0.2
_IDLE_SECONDS = 30.0


class AllocationLog:
    """Its newest 20,000 events, oldest first; the feed is closed after 30 s without a request."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self._events: deque[pb.AllocationEvent] = deque(maxlen=_MAX_EVENTS)
        self._feed: asyncio.Task[None] | None = None
        self._asked = 0.0

    async def events(self) -> list[pb.AllocationEvent]:
        """All that is known; the first call waits a moment for it."""
        self._asked = time.monotonic()
        if self._feed is None or self._feed.done():
            self._feed = asyncio.create_task(self._follow())
            await self._first_events()
        return list(self._events)

    async def _first_events(self) -> None:
        """Wait until what is stored has come: the feed never ends."""
        assert self._feed is not None
        deadline, number = time.monotonic() + _FIRST_SECONDS, -1
        while time.monotonic() < deadline and not self._feed.done() and len(self._events) != number:
            number = len(self._events) or -1
            await asyncio.sleep(_QUIET_SECONDS)

    async def close(self) -> None:
        if self._feed is not None:
            self._feed.cancel()
            await asyncio.wait([self._feed])

    async def _follow(self) -> None:
        after = self._events[-1].sequence if self._events else 0
        request = pb.WatchAllocationsRequest(run_id=self.store.run_id, after_sequence=after)
        while time.monotonic() - self._asked < _IDLE_SECONDS:
            try:
                async for response in self.store.scheduler.WatchAllocations(
                    request, timeout=_IDLE_SECONDS
                ):
                    self._events.extend(response.events)
                    request.after_sequence = self._events[-1].sequence
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                    return
