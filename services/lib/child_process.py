"""A process of ours: in a session of its own, and gone when we are."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

__all__ = ["Child"]


class Child:
    """One life of a child process, and of all that it starts in its process group."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Use `start`."""
        self._process = process
        self._ended = asyncio.create_task(self._follow(), name=f"child-{process.pid}")

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], log: Path | None = None
    ) -> Self:
        """Start `command` with exactly this environment.

        Args:
            command: arguments, the program first.
            environment: all of it.
            log: file that its output is appended to; None: our own output.

        Raises:
            OSError: `log` cannot be written. A program that cannot be run ends with a code at once,
                or is an OSError too where there is no `setpriv`.
        """
        output = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            process = await asyncio.create_subprocess_exec(
                *_tied_to_us(command),
                env=dict(environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C in the terminal is ours to pass on, in order.
                start_new_session=True,
            )
        finally:
            if output is not None:
                os.close(output)
        return cls(process)

    @property
    def pid(self) -> int:
        """Its process id, which names its process group and its session too."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """False once all of it has ended."""
        return not self._ended.done()

    async def wait(self) -> int:
        """Wait for its end; returns its exit code, or minus the signal that ended it."""
        return await asyncio.shield(self._ended)

    async def end(self, seconds: float) -> None:
        """Ask it to end, and kill all of it after `seconds`."""
        if self.is_running:
            with suppress(ProcessLookupError):
                self._process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.wait()
        self.kill()
        await self.wait()

    def kill(self) -> None:
        """End all of it now."""
        if self.is_running:
            self._kill_group()

    async def _follow(self) -> int:
        code = await self._process.wait()
        self._kill_group()  # it outlives its leader as long as any member does
        return code

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def _tied_to_us(command: Sequence[str]) -> Sequence[str]:
    """If we are killed outright nothing of ours may stay behind; Linux can see to that."""
    setpriv = shutil.which("setpriv")
    return command if setpriv is None else (setpriv, "--pdeathsig", "TERM", "--", *command)
