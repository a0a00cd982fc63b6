"""A version that the server keeps for a time, for rollouts that are pinned to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class WeightHold:
    """At most one held version; it is held until its time has passed or a hold of 0 s."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` counts seconds."""
        self._clock = clock
        self._version, self._end = 0, 0.0
        self._changed, self._begun = asyncio.Event(), asyncio.Event()

    @property
    def weight_version(self) -> int | None:
        """The held version; None if none is held."""
        return self._version if self._clock() < self._end else None

    def set(self, weight_version: int, seconds: float | None) -> None:
        """Hold the version from now on for `seconds`; None changes nothing."""
        if seconds is None:
            return
        self._version, self._end = weight_version, self._clock() + seconds
        self._changed.set()
        if seconds:
            self._begun.set()

    async def ended(self) -> None:
        """Wait until no version is held."""
        while self.weight_version is not None:
            self._changed.clear()
            try:
                async with asyncio.timeout(self._end - self._clock()):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def next_end(self) -> None:
        """Wait for a hold, and until it has ended."""
        await self._begun.wait()
        self._begun.clear()
        await self.ended()
