"""A child process in a separate session, killed with all that it started when it ends."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from seamflow.processes.left_processes import MARK, end_left


class Child:
    """One start of a child process, with all processes that it starts, in any group."""

    def __init__(self, process: asyncio.subprocess.Process, mark: str) -> None:
        """Use `start`."""
        self._process, self._mark = process, mark
        self._ended = asyncio.create_task(self._follow(), name=f"child-{process.pid}")

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path | None = None,
        *,
        umask: int = -1,
        death_signal: str = "TERM",
    ) -> Self:
        """Start `command` with `environment`, not this process's own.

        Args:
            command: arguments, the program first.
            environment: all variables.
            log: file that its output is appended to, for this user alone; None: this process's
                output.
            umask: permissions that its files never have; -1: those of this process.
            death_signal: what it gets when this process is killed, such as "KILL".

        Raises:
            OSError: `log` cannot be written. A program that cannot be run exits immediately, or is
                an OSError too on a system without `setpriv`.
        """
        output = (
            None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        )
        # uvloop, which runs node agents, has no such parameter.
        own: dict[str, Any] = {"umask": umask} if umask >= 0 else {}
        mark = secrets.token_hex(16)
        try:
            process = await asyncio.create_subprocess_exec(
                *_tied_to_us(command, death_signal),
                env={**environment, MARK: mark},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # A Ctrl-C in the terminal is forwarded by this process, in order.
                start_new_session=True,
                **own,
            )
        finally:
            if output is not None:
                os.close(output)
        return cls(process, mark)

    @property
    def pid(self) -> int:
        """Its process id, which is also the id of its process group and session."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """False once all processes of the group have ended."""
        return not self._ended.done()

    async def wait(self) -> int:
        """Wait until it ends; returns its exit code, or minus the signal that ended it."""
        return await asyncio.shield(self._ended)

    async def end(self, seconds: float) -> None:
        """SIGTERM it, and kill its group after `seconds`."""
        if self.is_running:
            with suppress(ProcessLookupError):
                self._process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.wait()
        self.kill()
        await self.wait()

    def kill(self) -> None:
        if self.is_running:
            self._kill_group()

    async def _follow(self) -> int:
        code = await self._process.wait()
        self._kill_group()  # members may outlive the leader
        return code

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        end_left(self._mark)  # those that have left the group


def _tied_to_us(command: Sequence[str], signal_name: str) -> Sequence[str]:
    """`command` with a parent-death signal (Linux), so that it ends if this process is killed."""
    setpriv = shutil.which("setpriv")
    return command if setpriv is None else (setpriv, "--pdeathsig", signal_name, "--", *command)
