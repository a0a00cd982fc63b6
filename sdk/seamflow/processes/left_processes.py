"""Processes that the user's code has started and left, found by a mark in their environment.

A process group does not hold them: whoever calls setsid leaves it, and whoever is orphaned has
another parent. Variables are inherited all the way.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from seamflow.processes import procfs

MARK = "SEAMFLOW_STARTED_AS"
"""Variable of a process and of all that it starts: words, the last one of the process itself."""

_ROUNDS = 10
"""Looks for those that were started during the one before."""
_LOOKS_WITHOUT = 2
"""That find none: a process shows no environment for the moment in which it becomes a program."""
_EXIT_SECONDS = 10.0
_BUG = 70  # sysexits.h


_is_whole = threading.Event()


@contextmanager
def whole_process() -> Iterator[None]:
    """The block is all that this process does, so that whatever is left of it may be ended.

    What this process starts is marked, and what is left at the end of the block is killed.
    """
    _is_whole.set()
    before, mark = os.environ.get(MARK), secrets.token_hex(16)
    os.environ[MARK] = mark if before is None else f"{before} {mark}"
    try:
        yield
    finally:
        end_left(mark, below=os.getpid())
        os.environ.pop(MARK)
        if before is not None:
            os.environ[MARK] = before


def end_left(mark: str, below: int = 0) -> None:
    """Kill all processes with this `mark`, and the descendants of process `below`; not this one."""
    looks_without = 0
    for _ in range(_ROUNDS):
        found = _marked(mark) | (_descendants(below) if below else set())
        for pid in found - {os.getpid()}:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        looks_without = 0 if found - {os.getpid()} else looks_without + 1
        if looks_without == _LOOKS_WITHOUT:
            return
        time.sleep(0.01)


async def ended_for_sure(work: Awaitable[None], seconds: float = _EXIT_SECONDS) -> None:
    """The work of a `whole_process`, which ends `seconds` after it at the latest.

    A thread of the user's code that never returns would keep the interpreter from ending, for
    ever if nobody is left to kill it.
    """
    code = _BUG
    try:
        await work
        code = 0
    finally:
        if _is_whole.is_set():
            threading.Thread(target=_exit_after, args=(seconds, code), daemon=True).start()


def exit_if_forked(pid: int) -> None:
    """End a copy of the process `pid` that the user's code has made and let return from its call.

    It would go on with everything that the first one does, on the same connections.
    """
    if os.getpid() != pid:
        os._exit(0)


def _exit_after(seconds: float, code: int) -> None:
    time.sleep(seconds)
    own = os.environ.get(MARK, "").split()
    if own:
        end_left(own[-1], below=os.getpid())
    os._exit(code)


def _marked(mark: str) -> set[int]:
    """Ids of the processes with the mark; none where there is no /proc."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if mark.encode() in _mark_of((folder / "environ").read_bytes()):
                found.add(int(folder.name))
    return found


def _mark_of(environ: bytes) -> list[bytes]:
    start = f"{MARK}=".encode()
    lines = (line for line in environ.split(b"\0") if line.startswith(start))
    return next(lines, start).removeprefix(start).split()


def _descendants(pid: int) -> set[int]:
    """Ids of the living children of a process, and of theirs."""
    found = procfs.descendants(pid, procfs.read_all())
    return {each.identity.pid for each in found if not each.is_over} - {pid}
