"""A small training run whose processes, Redis among them, are ended by signals meanwhile."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from services.launcher import redis_server
from services.launcher.service_clients import Services
from services.launcher.supervisor import Supervisor
from tests.chaos.restarts.restarts import Restart
from tests.chaos.restarts.signalled import End, SignalledSupervisor
from tests.suites.mixed.changes import Change
from tests.suites.mixed.mixed_run import MixedRun

_LOOK_SECONDS = 0.1
_TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a restart."""

    process: str
    signal: signal.Signals
    end: End
    seconds_to_serve: float
    """From the start of the new process until it takes calls."""
    seconds_to_step: float
    """From then on, until a further optimizer step was committed."""

    @property
    def drained(self) -> bool:
        """Whether it ended as a drain ends: 0 for our own and for Redis, as SIGTERM asks."""
        return self.end.code == 0


@dataclass(slots=True, kw_only=True)
class RestartRun(MixedRun):
    """Training that goes on through every restart."""

    outcomes: list[Outcome] = field(default_factory=list)
    """Of each restart, in order."""

    async def _apply(self, change: Change, processes: Supervisor, services: Services) -> None:
        assert isinstance(change, Restart)
        signalled = cast(SignalledSupervisor, processes)
        self._port_file(change.process).unlink(missing_ok=True)
        end = await signalled.end(change.process, change.signal)
        began = time.monotonic()
        is_ours = change.process in self.trees
        plan = self._plan(change.process) if is_ours else self.plans[change.process]
        await processes.start(plan)
        await self._serves(change.process)
        serves, since = time.monotonic(), time.time()
        await self._steps_follow(services, 1)
        self.outcomes.append(
            Outcome(
                process=change.process,
                signal=change.signal,
                end=end,
                seconds_to_serve=serves - began,
                seconds_to_step=time.monotonic() - serves,
            )
        )
        await self._steps_follow(services)
        while not await self._takes_part(change.process, since, services):
            await asyncio.sleep(_LOOK_SECONDS)

    async def _serves(self, process: str) -> None:
        """Wait until it takes calls; the environment's servers and Redis have no port file."""
        if process == "redis":
            await redis_server.wait_for_store(self.layout.redis_url)
        elif process.startswith("environment_server"):
            await self._is_reached(self.layout.ports[process.replace("-", "/")])
        else:
            await MixedRun._serves(self, process)

    async def _is_reached(self, port: int) -> None:
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(_LOOK_SECONDS)

    async def _summarize(self, processes: Supervisor, services: Services) -> dict[str, Any]:
        """The summary, with the restarts and what the logs of all processes hold."""
        summary = await MixedRun._summarize(self, processes, services)
        logs = {
            file.stem: file.read_text(errors="replace") for file in self.layout.logs().glob("*.log")
        }
        return {
            **summary,
            "outcomes": [asdict(each) for each in self.outcomes],
            "tracebacks": sum(text.count(_TRACEBACK) for text in logs.values()),
        }
