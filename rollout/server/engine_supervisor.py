"""Start a dead engine again, if it can be, with current weights before it gets traffic."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from rollout.server.engines.engine import EngineFailed
from rollout.server.server import RolloutServer, State
from services.chassis import metrics
from services.chassis.log import get_logger

__all__ = ["EngineSupervisor"]

Begin = Callable[[], Coroutine[Any, Any, None]]

_RESTARTS = metrics.counter("rollout_server", "engine_restarts_total", "Engines started again.")
_QUICK_SECONDS = 5.0
_MOST_QUICK_DEATHS = 5


class EngineSupervisor:
    """One loop. Turns of a dead engine fail as UNAVAILABLE, so that they go on elsewhere."""

    def __init__(
        self,
        server: RolloutServer,
        begin: Begin,
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
        quick, begin = 0, _served_already
        while True:
            born = self._clock()
            error = await self._death(begin)
            quick = quick + 1 if self._clock() - born < _QUICK_SECONDS else 0
            if not self._may_restart() or quick >= _MOST_QUICK_DEATHS:
                raise error
            self._log.warning("engine_failed", error=str(error))
            await self._server.restart()
            _RESTARTS.inc()
            begin = self._begin

    async def _death(self, begin: Begin) -> Exception:
        """Wait for the engine to die: maybe while `begin` still waits for the weights service."""
        try:
            async with asyncio.TaskGroup() as life:
                life.create_task(self._server.engine.wait_failed())
                life.create_task(begin())
        except ExceptionGroup as ends:
            deaths, others = ends.split(EngineFailed)
            if others is not None:
                raise others from None
            assert deaths is not None
            return deaths.exceptions[0]
        raise AssertionError("an engine is waited for until it dies")

    def _may_restart(self) -> bool:
        # Where memory is released somebody else has it: nothing may take it now.
        states = (State.LOADING, State.SERVING, State.PAUSED)
        return "restart" in self._server.engine.info.features and self._server.state in states


async def _served_already() -> None:
    """The server's first life begins elsewhere."""
