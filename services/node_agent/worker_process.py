"""Supervision of a node's worker processes: start, restart, end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Self

from services.chassis import metrics
from services.chassis.errors import ExitCode
from services.chassis.log import get_logger
from services.lib.child_process import Child
from services.node_agent.config import ProcessConfig
from services.node_agent.process_journal import ProcessJournal

_STABLE_SECONDS = 30.0
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 30.0
_LEFT_OVER_SECONDS = 5.0
_CANNOT_RUN = 127  # as in a shell
_NOT_INHERITED = "SEAMFLOW_PORT_FILE"


class WorkerProcess:
    """A supervised process: `waiting -> running -> ended -> back-off -> waiting`.

    It keeps running across switches, which move device state only. One that exits with code 0 has
    finished: it is restarted only after `set_restart(True)`.

    Args:
        name: unique on the node.
        plan: command and timeouts.
        environment: variables added to the node agent's own.
        journal: records the process and its descendants.
        epoch: current assignment epoch.
        changed: called when it has ended.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        plan: ProcessConfig,
        environment: Mapping[str, str],
        *,
        journal: ProcessJournal,
        epoch: Callable[[], int],
        changed: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.plan = plan
        self._environment = environment
        self._journal = journal
        self._epoch = epoch
        self._changed = changed
        self._clock = clock
        self._child: Child | None = None
        self._stopped = asyncio.Event()
        self._stopped.set()
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._ends = metrics.counter(
            "node_agent", "worker_ends_total", "Ends of worker processes by name.", ("process",)
        )

    @property
    def is_running(self) -> bool:
        """False once it and its descendants have ended, so that it holds no device."""
        return not self._stopped.is_set()

    def set_restart(self, enabled: bool) -> None:
        if enabled:
            self._may_start.set()
        else:
            self._may_start.clear()

    async def run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            await self._may_start.wait()
            began = self._clock()
            code = await self._run_once()
            if self._clock() - began >= _STABLE_SECONDS:
                pause = _FIRST_PAUSE_SECONDS
            if code == ExitCode.CLEAN:
                self.set_restart(False)
            get_logger().warning("worker_ended", process=self.name, code=code, pause_seconds=pause)
            self._ends.labels(self.name).inc()
            self._changed()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def resident_bytes(self) -> int:
        child = self._child
        return 0 if child is None else await self._journal.update(self.name, child.pid)

    async def kill(self) -> None:
        """Kill it and its descendants; returns when all have ended."""
        await self.resident_bytes()  # records new descendants
        if self._child is not None:
            self._child.kill()
        await self._stopped.wait()

    async def end(self) -> None:
        """SIGTERM it, then kill what remains after a timeout; not concurrently with `run`."""
        await self.resident_bytes()
        if self._child is not None:
            await self._child.end(self.plan.end_seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEFT_OVER_SECONDS):
                await self._journal.clear(self.name)

    async def _run_once(self) -> int:
        """Run it until it and its descendants have ended; returns the exit code."""
        environment = {**os.environ, **self._environment}
        environment.pop(_NOT_INHERITED, None)
        self._stopped.clear()
        try:
            self._child = await Child.start(self.plan.command, environment)
        except OSError as error:
            get_logger().error("worker_not_started", process=self.name, error=str(error))
            self._stopped.set()
            return _CANNOT_RUN
        self._journal.add(self.name, self._child.pid, self._epoch())
        get_logger().info("worker_started", process=self.name, pid=self._child.pid)
        code = await self._child.wait()
        await self._journal.clear(self.name)
        self._child = None
        self._stopped.set()
        return code


class WorkerProcesses:
    """Worker processes of a node, by address; leaving the context ends them."""

    def __init__(self, by_address: Mapping[str, WorkerProcess]) -> None:
        self.by_address = by_address

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for process in self.by_address.values():
                tasks.create_task(process.run())

    async def resident_bytes(self) -> int:
        return sum([await process.resident_bytes() for process in self.by_address.values()])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.gather(*(process.end() for process in self.by_address.values()))
