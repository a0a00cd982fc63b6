"""On-disk journal of started processes, with which a restarted node agent ends orphans."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from seamflow.processes import procfs
from seamflow.processes.procfs import Identity

from services.chassis import metrics
from services.chassis.errors import DependencyUnavailable
from services.chassis.log import get_logger

_FILE = "processes.json"
_LOCK = "lock"
_POLL_SECONDS = 0.02
_KILL_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class _Entry:
    """A worker process and its descendants."""

    epoch: int
    """Assignment under which it was started."""
    members: frozenset[Identity]
    """The process and its descendants, including those whose parents have ended."""


class ProcessJournal:
    """Journal of live processes by worker process name.

    The agent may be killed at any moment, so a process is recorded as soon as it is started. The
    file need not survive a reboot: neither do the processes.

    Args:
        folder: used by this agent only; created if missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: dict[str, _Entry] = {}
        self._lock = -1
        self._orphans = metrics.counter(
            "node_agent", "orphans_killed_total", "Killed processes of an earlier node agent."
        )

    async def __aenter__(self) -> Self:
        """Lock the folder, and end the processes that an earlier agent left.

        Raises:
            DependencyUnavailable: another agent uses the folder; or a process cannot be ended and
                may still hold the device.
        """
        if procfs.read(os.getpid()) is None:
            raise DependencyUnavailable("/proc", "worker processes are supervised on Linux only")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock_folder()
        self._entries = self._read()
        await self._end_orphans()
        return self

    async def __aexit__(self, *error: object) -> None:
        os.close(self._lock)

    def add(self, name: str, pid: int, epoch: int) -> None:
        """Worker process `name` was started with id `pid`."""
        process = procfs.read(pid)
        if process is not None:
            self._put(name, _Entry(epoch, frozenset({process.identity})))

    async def update(self, name: str, pid: int) -> int:
        """Record the descendants of worker process `name`; returns their host memory in bytes."""
        table = await asyncio.to_thread(procfs.read_all)
        tree = procfs.descendants(pid, table)
        if (entry := self._entries.get(name)) is not None:
            found = {member.identity for member in tree if not member.is_over}
            orphans = {identity for identity in entry.members if procfs.is_alive(identity)}
            self._put(name, _Entry(entry.epoch, frozenset(found | orphans)))
        return sum(member.resident_bytes for member in tree)

    async def clear(self, name: str) -> None:
        """Kill the remaining processes of worker process `name`; returns when all have ended."""
        entry = self._entries.get(name, _Entry(0, frozenset()))
        for identity in entry.members:
            procfs.kill(identity)
        while any(procfs.is_alive(identity) for identity in entry.members):
            await asyncio.sleep(_POLL_SECONDS)
        self._put(name, None)

    async def _end_orphans(self) -> None:
        for name, entry in dict(self._entries).items():
            alive = sorted(one.pid for one in entry.members if procfs.is_alive(one))
            if alive:
                get_logger().warning(
                    "orphan_processes", process=name, pids=alive, epoch=entry.epoch
                )
                self._orphans.inc(len(alive))
            try:
                async with asyncio.timeout(_KILL_TIMEOUT_SECONDS):
                    await self.clear(name)
            except TimeoutError as error:
                message = f"processes {alive} of an earlier node agent do not end on SIGKILL"
                raise DependencyUnavailable(name, message) from error

    def _lock_folder(self) -> None:
        self._lock = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            message = "another node agent runs with it; end that one, or set another state_folder"
            raise DependencyUnavailable(f"state_folder {self._folder}", message) from error

    def _put(self, name: str, entry: _Entry | None) -> None:
        if self._entries.get(name) == entry:
            return
        self._entries.pop(name, None)
        if entry is not None:
            self._entries[name] = entry
        self._write()

    def _write(self) -> None:
        content = {
            name: {"epoch": entry.epoch, "members": sorted(entry.members)}
            for name, entry in self._entries.items()
        }
        partial = self._folder / f"{_FILE}.part"
        partial.write_text(json.dumps(content))
        partial.replace(self._folder / _FILE)

    def _read(self) -> dict[str, _Entry]:
        text = "{}"
        with suppress(FileNotFoundError):
            text = (self._folder / _FILE).read_text()
        # Empty after a crash of the machine, which leaves no process either.
        content = json.loads(text or "{}")
        return {
            # A neighbouring release may know more of each.
            name: _Entry(entry["epoch"], frozenset(Identity(*one[:2]) for one in entry["members"]))
            for name, entry in content.items()
        }
