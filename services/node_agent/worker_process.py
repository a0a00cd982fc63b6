"""The processes of a node's workers: started, watched, started again, ended."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

from services.chassis import metrics
from services.chassis.errors import ExitCode
from services.chassis.log import get_logger
from services.lib.child_process import Child
from services.node_agent.config import ProcessConfig
from services.node_agent.process_journal import Roster

__all__ = ["WorkerProcess", "WorkerProcesses"]

_CALM_SECONDS = 30.0
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 30.0
_LEFT_OVER_SECONDS = 5.0
_CANNOT_RUN = 127  # as in a shell
_NOT_INHERITED = "SEAMFLOW_PORT_FILE"


class WorkerProcess:
    """One process, kept running: `waiting -> running -> ended -> back-off -> waiting`.

    It stays across switches, so that a switch moves device state only. One that ended by itself
    with code 0 has done its work: it waits until it is wanted again.

    Args:
        name: unique on the node.
        plan: how it is started and ended.
        roster: where its life is written down.
        epoch: assignment now.
        changed: called when it has ended.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        plan: ProcessConfig,
        *,
        roster: Roster,
        epoch: Callable[[], int],
        changed: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.plan = plan
        self._roster = roster
        self._epoch = epoch
        self._changed = changed
        self._clock = clock
        self._child: Child | None = None
        self._down = asyncio.Event()
        self._down.set()
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._ends = metrics.counter(
            "node_agent", "worker_ends_total", "Ends of worker processes by name.", ("process",)
        )

    @property
    def is_running(self) -> bool:
        """False once nothing of it is left, so that it holds no device."""
        return not self._down.is_set()

    def want(self, wanted: bool) -> None:
        """Whether it is started again after its next end."""
        if wanted:
            self._wanted.set()
        else:
            self._wanted.clear()

    async def run(self) -> None:
        """Keep it running, until cancelled."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            await self._wanted.wait()
            began = self._clock()
            code = await self._live()
            if self._clock() - began >= _CALM_SECONDS:
                pause = _FIRST_PAUSE_SECONDS
            if code == ExitCode.CLEAN:
                self.want(False)
            get_logger().warning("worker_ended", process=self.name, code=code, pause_seconds=pause)
            self._ends.labels(self.name).inc()
            self._changed()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def resident_bytes(self) -> int:
        """Host memory of it and of what it has started."""
        child = self._child
        return 0 if child is None else await self._roster.look(self.name, child.pid)

    async def kill(self) -> None:
        """End it now, with all that it has started; returns when nothing of it is left."""
        await self.resident_bytes()  # for what it has started meanwhile
        if self._child is not None:
            self._child.kill()
        await self._down.wait()

    async def end(self) -> None:
        """Ask it to end, and kill what is left of it; not while `run` goes on."""
        await self.resident_bytes()
        if self._child is not None:
            await self._child.end(self.plan.end_seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEFT_OVER_SECONDS):
                await self._roster.clear(self.name)

    async def _live(self) -> int:
        """From its start until nothing of it is left; returns how it ended."""
        environment = {**os.environ, **self.plan.environment}
        environment.pop(_NOT_INHERITED, None)
        self._down.clear()
        try:
            self._child = await Child.start(self.plan.command, environment)
        except OSError as error:
            get_logger().error("worker_not_started", process=self.name, error=str(error))
            self._down.set()
            return _CANNOT_RUN
        self._roster.add(self.name, self._child.pid, self._epoch())
        get_logger().info("worker_started", process=self.name, pid=self._child.pid)
        code = await self._child.wait()
        await self._roster.clear(self.name)
        self._child = None
        self._down.set()
        return code


class WorkerProcesses:
    """All of a node, by the address of their workers; leaving the context ends them."""

    def __init__(self, by_address: Mapping[str, WorkerProcess]) -> None:
        self.by_address = by_address

    async def run(self) -> None:
        """Keep them running, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for process in self.by_address.values():
                tasks.create_task(process.run())

    async def resident_bytes(self) -> int:
        """Host memory of all."""
        return sum([await process.resident_bytes() for process in self.by_address.values()])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.gather(*(process.end() for process in self.by_address.values()))
