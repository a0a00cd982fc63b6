"""Restarts a failed engine and loads current weights before it serves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from rollout.server.engine_lifecycle import EngineLifecycle, State
from rollout.server.engines.engine import EngineFailed
from services.chassis import metrics
from services.chassis.log import get_logger

Begin = Callable[[], Coroutine[Any, Any, None]]

_RESTARTS = metrics.counter("rollout_server", "engine_restarts_total", "Engines started again.")
_EARLY_FAILURE_SECONDS = 5.0
_MAX_EARLY_FAILURES = 5


class EngineSupervisor:
    """Turns of a failed engine fail with UNAVAILABLE, so that they continue on other servers."""

    def __init__(
        self,
        server: EngineLifecycle,
        begin: Begin,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`begin` loads the newest weights, retrying without a limit, and then serves."""
        self._server = server
        self._begin = begin
        self._clock = clock
        self._log = get_logger()

    async def run(self) -> None:
        """Watch the engine until cancelled.

        Raises `EngineFailed`, which ends the process, for an engine that cannot be restarted, that
        failed while its memory was released, or that failed five times within 5 s of its start.
        """
        num_early, begin = 0, _already_begun
        while True:
            started = self._clock()
            error = await self._wait_failure(begin)
            num_early = num_early + 1 if self._clock() - started < _EARLY_FAILURE_SECONDS else 0
            if not self._may_restart() or num_early >= _MAX_EARLY_FAILURES:
                raise error
            self._log.warning("engine_failed", error=str(error))
            await self._server.restart()
            _RESTARTS.inc()
            begin = self._begin

    async def _wait_failure(self, begin: Begin) -> Exception:
        """Wait for the engine to fail, possibly while `begin` waits for the weights service."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._server.engine.wait_failed())
                tasks.create_task(begin())
        except ExceptionGroup as failures:
            engine_failures, others = failures.split(EngineFailed)
            if others is not None:
                raise others from None
            assert engine_failures is not None
            return engine_failures.exceptions[0]
        raise AssertionError("wait_failed returned without a failure")

    def _may_restart(self) -> bool:
        # Released memory may be used by another process: do not take it back here.
        states = (State.LOADING, State.SERVING, State.PAUSED)
        return "restart" in self._server.engine.info.features and self._server.state in states


async def _already_begun() -> None:
    """The server is begun by `WeightWatcher` the first time."""
