"""Processes of this machine, read from Linux' /proc."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_BOOT_ID = _PROC / "sys/kernel/random/boot_id"
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
    is_over: bool
    """It has ended and its parent has not reaped it yet."""


def read(pid: int) -> Process | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    parts = text.rpartition(") ")[2].split()
    return Process(
        identity=Identity(pid, f"{_BOOT_ID.read_text().strip()}/{parts[_START_TICKS]}"),
        parent=int(parts[_PARENT]),
        resident_bytes=int(parts[_RESIDENT_PAGES]) * os.sysconf("SC_PAGESIZE"),
        is_over=parts[_STATE] in "ZX",
    )


def read_all() -> dict[int, Process]:
    found = (read(int(entry.name)) for entry in _PROC.iterdir() if entry.name.isdigit())
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
