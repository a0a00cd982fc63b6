"""Long polls: attempt, wait until something changed in the run, attempt again.

State is in the store and changes through any replica, so a change is detected by polling the run's
change number; all calls of a run share one poll. Calls that wait for the same thing are queued, and
only the first few attempt; one that succeeds leaves its place to the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from trajectory_manager.model.records import Topic
from trajectory_manager.store.redis.run_store import RunStore

Result = TypeVar("Result")

MAX_WAIT_SECONDS = 60.0
_READ_SECONDS = 0.05
_IDLE_READ_SECONDS = 0.25
"""Between reads of the change number, once it has stayed the same for two seconds."""
_SLOWDOWN = 1.1
# Some changes have no change number: a lease expires.
_RETRY_SECONDS = 1.0
_QUEUE_HEAD = 8


@dataclass(slots=True)
class Reading:
    """The newest change number read, shared by all waiting calls."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    version: int = -1
    time: float = float("-inf")
    seconds: float = _READ_SECONDS
    """Until the next read."""

    def take(self, version: int, now: float) -> None:
        """A new reading: while nothing changes, the next ones are further apart."""
        slower = min(_IDLE_READ_SECONDS, self.seconds * _SLOWDOWN)
        self.seconds = slower if version == self.version else _READ_SECONDS
        self.version, self.time = version, now


class LongPoll:
    """Repeats attempts until one succeeds or times out."""

    def __init__(self, runs: RunStore) -> None:
        self._runs = runs
        self._readings: dict[tuple[str, Topic], Reading] = {}
        self._queues: dict[tuple[str, Topic, str], asyncio.Semaphore] = {}
        self._draining = False

    async def until(
        self,
        run_id: str,
        topic: Topic,
        seconds: float,
        attempt: Callable[[], Awaitable[Result | None]],
        queue: str | None = None,
    ) -> Result | None:
        """The first result of `attempt` that is not None; None after `seconds` (at most 60).

        Calls with the same `queue` wait for the same thing: while those at its head get nothing,
        the others would not either, and may time out without an attempt.
        """
        deadline = asyncio.get_running_loop().time() + min(seconds, MAX_WAIT_SECONDS)
        if queue is None:
            return await self._poll(run_id, topic, deadline, attempt)
        first = self._queues.setdefault((run_id, topic, queue), asyncio.Semaphore(_QUEUE_HEAD))
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
            # Read before the attempt, so that a change during it is detected.
            seen = 0 if self._has_ended(deadline) else await self._version(run_id, topic)
            result = await attempt()
            if result is not None or self._has_ended(deadline):
                return result
            await self._changed(run_id, topic, seen, min(deadline, clock() + _RETRY_SECONDS))

    def _has_ended(self, deadline: float) -> bool:
        return self._draining or asyncio.get_running_loop().time() >= deadline

    def drain(self) -> None:
        """Let every waiting call return now."""
        self._draining = True

    async def _changed(self, run_id: str, topic: Topic, seen: int, until: float) -> None:
        clock = asyncio.get_running_loop().time
        while not self._draining and clock() < until:
            wait = self._readings[run_id, topic].seconds
            await asyncio.sleep(max(0.0, min(wait, until - clock())))
            if await self._version(run_id, topic) != seen:
                return

    async def _version(self, run_id: str, topic: Topic) -> int:
        clock = asyncio.get_running_loop().time
        reading = self._readings.setdefault((run_id, topic), Reading())
        async with reading.lock:
            if clock() - reading.time >= reading.seconds:
                reading.take(await self._runs.version(run_id, topic), clock())
            return reading.version
