"""Child processes that are ended by a signal of choice, and how they ended."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass

from services.launcher.supervisor import Supervisor

END_SECONDS = 60.0
"""Twice what a drain may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a process ended."""

    code: int | None
    """Exit code, or minus the signal that ended it; None: not within `END_SECONDS`."""
    seconds: float
    """From the signal to its end."""


class SignalledSupervisor(Supervisor):
    """Children that a drill ends."""

    async def end(self, name: str, number: signal.Signals) -> End:
        """Send the signal to the process and wait for its end; it is not started again."""
        self._watchers.pop(name).cancel()
        child, began = self._children.pop(name), time.monotonic()
        os.kill(child.pid, number)
        code: int | None = None
        try:
            async with asyncio.timeout(END_SECONDS):
                code = await child.wait()
        except TimeoutError:
            await child.end(0.0)
        return End(code=code, seconds=time.monotonic() - began)
