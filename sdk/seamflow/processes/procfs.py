"""Processes of this machine, read from Linux' /proc."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
# Fields of /proc/<pid>/stat, counted from the state, which follows the name in parentheses.
_STATE, _PARENT, _START_TICKS, _RESIDENT_PAGES = 0, 1, 19, 21


class Identity(NamedTuple):
    """Identity of a process: its id, which the kernel reuses, and its start time."""

    pid: int
    started: str
    """Boot of the machine, and clock ticks from then to the start of the process."""


@dataclass(frozen=True, slots=True)
class Process:
    """State of a process when it was read."""

    identity: Identity
    parent: int
    resident_bytes: int
    """Host memory it occupies, shared pages included."""
    state: str
    """A letter of proc_pid_stat(5)."""
    age: float
    """Seconds since its start."""

    @property
    def is_over(self) -> bool:
        """It has ended and its parent has not reaped it yet."""
        return self.state in "ZX"

    @property
    def is_stopped(self) -> bool:
        """A signal has stopped it."""
        return self.state == "T"


@lru_cache(maxsize=1)
def _boot() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def read(pid: int) -> Process | None:
    """None: there is no such process, or no /proc."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    parts = text.rpartition(") ")[2].split()
    return Process(
        identity=Identity(pid, f"{_boot()}/{parts[_START_TICKS]}"),
        parent=int(parts[_PARENT]),
        resident_bytes=int(parts[_RESIDENT_PAGES]) * os.sysconf("SC_PAGESIZE"),
        state=parts[_STATE],
        age=time.clock_gettime(time.CLOCK_BOOTTIME)
        - int(parts[_START_TICKS]) / os.sysconf("SC_CLK_TCK"),
    )


def read_all() -> dict[int, Process]:
    """None where there is no /proc."""
    found = (read(int(entry.name)) for entry in _PROC.glob("[0-9]*"))
    return {process.identity.pid: process for process in found if process is not None}


def descendants(pid: int, among: Mapping[int, Process]) -> list[Process]:
    """A process and all its descendants; empty if it does not exist."""
    children: dict[int, list[int]] = {}
    for one, process in among.items():
        children.setdefault(process.parent, []).append(one)
    members = [pid] if pid in among else []
    for member in members:  # grows during the iteration
        members.extend(children.get(member, ()))
    return [among[member] for member in members]


def is_alive(identity: Identity) -> bool:
    """Whether exactly this process still runs."""
    process = read(identity.pid)
    return process is not None and process.identity == identity and not process.is_over


def kill(identity: Identity) -> None:
    """SIGKILL exactly this process; no effect if it has ended.

    The descriptor is opened before the start time is compared, so that the signal cannot reach
    another process that reuses the id.
    """
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(identity.pid)
        try:
            if is_alive(identity):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
