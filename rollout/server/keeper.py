"""Start a dead engine again, if it can be, with current weights before it gets traffic."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from rollout.server.engine import EngineFailed
from rollout.server.server import RolloutServer, State
from services.chassis import metrics
from services.chassis.log import get_logger

__all__ = ["EngineKeeper"]

_RESTARTS = metrics.counter("rollout_server", "engine_restarts_total", "Engines started again.")
_QUICK_SECONDS = 5.0
_MOST_QUICK_DEATHS = 5


class EngineKeeper:
    """One loop. Turns of a dead engine fail as UNAVAILABLE, so that they go on elsewhere."""

    def __init__(
        self,
        server: RolloutServer,
        begin: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`begin` brings the newest weights in, however long that takes, and then serves."""
        self._server = server
        self._begin = begin
        self._clock = clock
        self._log = get_logger()

    async def run(self) -> None:
        """Watch until cancelled.

        Raises `EngineFailed`, which ends the process, for an engine that cannot be started again,
        that died while its memory was released, or that keeps dying as soon as it serves.
        """
        quick, beginning = 0, asyncio.create_task(asyncio.sleep(0))
        try:
            while True:
                served = self._clock()
                try:
                    await self._server.engine.wait_failed()
                except EngineFailed as error:
                    quick = quick + 1 if self._clock() - served < _QUICK_SECONDS else 0
                    if not self._may_restart() or quick >= _MOST_QUICK_DEATHS:
                        raise
                    self._log.warning("engine_failed", error=str(error))
                    beginning.cancel()
                    await self._server.restart()
                    _RESTARTS.inc()
                    # Not awaited: it may wait for the weights service while the engine dies again.
                    beginning = asyncio.create_task(self._serve())
        finally:
            beginning.cancel()

    def _may_restart(self) -> bool:
        # Where memory is released somebody else has it: nothing may take it now.
        states = (State.LOADING, State.SERVING, State.PAUSED)
        return "restart" in self._server.engine.info.features and self._server.state in states

    async def _serve(self) -> None:
        with suppress(EngineFailed):  # which `run` hears of too
            await self._begin()
