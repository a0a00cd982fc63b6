"""Seconds of the emulated hardware, which may pass faster than those of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Clock:
    """The event loop's clock, `speed` times as fast."""

    def __init__(self, speed: float = 1.0) -> None:
        self._loop = asyncio.get_running_loop()
        self._speed = speed

    def now(self) -> float:
        """Emulated seconds."""
        return self._loop.time() * self._speed

    async def sleep(self, seconds: float) -> None:
        """Let emulated seconds pass."""
        await asyncio.sleep(seconds / self._speed)

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call back at an emulated time."""
        return self._loop.call_at(when / self._speed, callback)
