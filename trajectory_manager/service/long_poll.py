"""Long-polls: try, sleep until something changed in the run, try again.

State is in the store and changes through any replica, so a change is seen by reading the run's
change number; all waiters of a run share one reader. Thousands who wait for the same thing stand in
line, and only the first few ask: whoever got something leaves its place to the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from trajectory_manager.model.records import Topic
from trajectory_manager.store.interface import RunStore

Result = TypeVar("Result")

MAX_WAIT_SECONDS = 60.0
_READ_SECONDS = 0.05
# Time itself can change an answer (a lease expires); no change number tells.
_RETRY_SECONDS = 1.0
_FIRST_IN_LINE = 8


@dataclass(slots=True)
class _Reading:
    """The newest change number read, shared by all who wait for it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    version: int = -1
    time: float = float("-inf")


class LongPoll:
    """Runs attempts until one succeeds or its time is up."""

    def __init__(self, runs: RunStore) -> None:
        self._runs = runs
        self._readings: dict[tuple[str, Topic], _Reading] = {}
        self._lines: dict[tuple[str, Topic, str], asyncio.Semaphore] = {}
        self._draining = False

    async def until(
        self,
        run_id: str,
        topic: Topic,
        seconds: float,
        attempt: Callable[[], Awaitable[Result | None]],
        line: str | None = None,
    ) -> Result | None:
        """The first result of `attempt` that is not None; None after `seconds` (at most 60).

        Callers with the same `line` ask the same: when one gets nothing, so would those behind it,
        who may run out of time without having asked.
        """
        deadline = asyncio.get_running_loop().time() + min(seconds, MAX_WAIT_SECONDS)
        if line is None:
            return await self._poll(run_id, topic, deadline, attempt)
        first = self._lines.setdefault((run_id, topic, line), asyncio.Semaphore(_FIRST_IN_LINE))
        if seconds <= 0:
            return await attempt()
        try:
            async with asyncio.timeout_at(deadline):
                await first.acquire()
        except TimeoutError:
            return None
        try:
            return await self._poll(run_id, topic, deadline, attempt)
        finally:
            first.release()

    async def _poll(
        self,
        run_id: str,
        topic: Topic,
        deadline: float,
        attempt: Callable[[], Awaitable[Result | None]],
    ) -> Result | None:
        clock = asyncio.get_running_loop().time
        while True:
            # Read before the attempt: a change in between is then seen as one.
            seen = 0 if self._is_over(deadline) else await self._version(run_id, topic)
            result = await attempt()
            if result is not None or self._is_over(deadline):
                return result
            await self._changed(run_id, topic, seen, min(deadline, clock() + _RETRY_SECONDS))

    def _is_over(self, deadline: float) -> bool:
        return self._draining or asyncio.get_running_loop().time() >= deadline

    def drain(self) -> None:
        """Let every waiting call answer now."""
        self._draining = True

    async def _changed(self, run_id: str, topic: Topic, seen: int, until: float) -> None:
        clock = asyncio.get_running_loop().time
        while not self._draining and clock() < until:
            await asyncio.sleep(max(0.0, min(_READ_SECONDS, until - clock())))
            if await self._version(run_id, topic) != seen:
                return

    async def _version(self, run_id: str, topic: Topic) -> int:
        clock = asyncio.get_running_loop().time
        reading = self._readings.setdefault((run_id, topic), _Reading())
        async with reading.lock:
            if clock() - reading.time >= _READ_SECONDS:
                reading.version = await self._runs.version(run_id, topic)
                reading.time = clock()
            return reading.version
