"""Child processes: started, watched, started again after a crash, and ended, all of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from services.chassis.errors import DependencyUnavailable, ExitCode
from services.launcher.process_plan import ProcessPlan
from services.lib.child_process import Child

__all__ = ["ChildFailed", "Supervisor", "child_environment"]

_MAX_RESTARTS = 5
_CALM_SECONDS = 30.0
_RESTART_SECONDS = 0.2
_HOPELESS = (ExitCode.USAGE, ExitCode.CONFIG)  # the same start would fail the same way
_TERM_SECONDS = 20.0


class ChildFailed(DependencyUnavailable):
    """A child process cannot run; carries the end of its log, and ends us with the same code."""

    def __init__(self, name: str, code: int, message: str) -> None:
        super().__init__(name, message)
        if code in _HOPELESS:
            self.exit_code = ExitCode(code)


class Supervisor:
    """Owns child processes; leaving its context ends them all."""

    def __init__(
        self,
        log_folder: Path,
        calm_seconds: float = _CALM_SECONDS,
        restart_seconds: float = _RESTART_SECONDS,
    ) -> None:
        """Log to `log_folder`; a child that ran for `calm_seconds` had recovered from its crash.

        The next start waits `restart_seconds`, and twice as long after each crash without recovery.
        """
        self._log_folder = log_folder
        self._calm_seconds, self._restart_seconds = calm_seconds, restart_seconds
        self._children: dict[str, Child] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_restarts = 0
        """Crashes that were answered by a new start."""
        self.given_up: list[str] = []
        """Optional processes that crashed too often."""

    async def start(self, plan: ProcessPlan) -> None:
        """Start a process and keep it running in the background."""
        self._children[plan.name] = await self._spawn(plan)
        self._watchers[plan.name] = asyncio.create_task(self._watch(plan))

    async def stop(self, name: str) -> None:
        """End one process, by force if it does not go."""
        self._watchers.pop(name).cancel()
        await self._children.pop(name).end(_TERM_SECONDS)

    async def finished(self, name: str) -> None:
        """Wait until a process has ended cleanly."""
        await self._watchers[name]

    async def failure(self) -> None:
        """Wait for a child that cannot run; raises `ChildFailed`."""
        await asyncio.shield(self._failed)

    def kill(self) -> None:
        """End everything now."""
        for child in self._children.values():
            child.kill()

    async def _spawn(self, plan: ProcessPlan) -> Child:
        environment = child_environment(plan.environment)
        return await Child.start(plan.command, environment, self._log(plan.name))

    async def _watch(self, plan: ProcessPlan) -> None:
        attempt, loop = 0, asyncio.get_running_loop()
        while True:
            started = loop.time()
            code = await self._children[plan.name].wait()
            if code == ExitCode.CLEAN:
                return
            if loop.time() - started >= self._calm_seconds:
                attempt = 0
            if not plan.restarts or code in _HOPELESS or attempt == _MAX_RESTARTS:
                break
            self.num_restarts += 1
            await asyncio.sleep(self._restart_seconds * 2**attempt)
            self._children[plan.name] = await self._spawn(plan)
            attempt += 1
        if plan.optional and code not in _HOPELESS:
            self.given_up.append(plan.name)
        elif not self._failed.done():
            reason = self._obituary(plan.name, code)
            self._failed.set_exception(ChildFailed(plan.name, code, reason))

    def _obituary(self, name: str, code: int) -> str:
        lines = self._log(name).read_text(errors="replace").splitlines()[-5:]
        return f"ended with code {code}; the end of {self._log(name)}:\n  " + "\n  ".join(lines)

    def _log(self, name: str) -> Path:
        return self._log_folder / f"{name}.log"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Newest first: agents go before the services they use.
        for name in reversed(self._children):
            self._watchers.pop(name).cancel()
        children = reversed(self._children.values())
        await asyncio.gather(*(child.end(_TERM_SECONDS) for child in children))
        if self._failed.done():
            self._failed.exception()  # retrieved: the failure was reported or is of no interest
        else:
            self._failed.cancel()


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The launcher's own environment, one thread for each process, and what the plan adds."""
    one_thread = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return {**one_thread, **os.environ, **extra, "PYTHONUNBUFFERED": "1"}
