"""The turns of an agent that does nothing wrong, quiet and beside a disturbance.

Its turns come one after the other: quiet, then beside the disturbance, and so on, and quiet at the
end, as the load of the machine changes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import psutil

from bench.harness.processes import Server
from bench.report import percentile

_SHARE = 0.99
_ROUNDS = 3
_LOOK_SECONDS = 0.1
_REST_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Turns:
    """Seconds of each of its turns."""

    quiet: list[float] = field(default_factory=list)
    """Before, between and after."""
    beside: list[float] = field(default_factory=list)
    """Beside the disturbance."""

    @property
    def p99_ratio(self) -> float:
        """99th percentile of the turns' time, beside the disturbance to quiet."""
        return percentile(self.beside, _SHARE) / percentile(self.quiet, _SHARE)


async def compared(
    turn: Callable[[], Awaitable[object]],
    disturbance: Callable[[], AbstractAsyncContextManager[object]],
    seconds: float,
) -> Turns:
    """Alternate quiet and disturbed phases of about `seconds` each."""
    await _repeated(turn, seconds / 2)  # warm
    found = Turns(quiet=await _repeated(turn, seconds))
    for _ in range(_ROUNDS):
        async with disturbance():
            found.beside.extend(await _repeated(turn, seconds))
        await asyncio.sleep(_REST_SECONDS)
        found.quiet.extend(await _repeated(turn, seconds))
    return found


async def _repeated(turn: Callable[[], Awaitable[object]], seconds: float) -> list[float]:
    """Seconds of each turn that begins within `seconds`."""
    limit, found = time.monotonic() + seconds, []
    while (began := time.monotonic()) < limit:
        await turn()
        found.append(time.monotonic() - began)
    return found


async def memory_growth(server: Server) -> int:
    """Most memory of a process and its children, less what they have now; until cancelled."""
    before = most = _memory(server)
    try:
        while True:
            most = max(most, _memory(server))
            await asyncio.sleep(_LOOK_SECONDS)
    except asyncio.CancelledError:
        return most - before


def _memory(server: Server) -> int:
    process = psutil.Process(server.pid)
    return sum(map(_resident, (process, *process.children(recursive=True))))


def _resident(process: psutil.Process) -> int:
    try:
        rss: int = process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0
    return rss
