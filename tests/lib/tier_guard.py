"""What a unit test may not do: start a process, or connect to Redis or another machine.

An audit hook sees each attempt, wherever in the process it is made; it forbids while a unit test
runs and lets everything pass otherwise.
"""

from __future__ import annotations

import multiprocessing.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from ipaddress import ip_address
from typing import Any

import pytest

from tests.lib.redis_server import running_ports

_STARTS = frozenset(
    {
        "subprocess.Popen",
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "multiprocessing.spawn",
    }
)
_REDIS_PORT = 6379


class _Guard:
    """OFF <-> ON; while ON, what was refused is in `refused`."""

    def __init__(self) -> None:
        self.is_on = False
        self.refused: list[str] = []
        self.others: frozenset[int | None] = frozenset()
        """Threads that other tests have left: what they do is not this test's."""

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """The audit hook."""
        if not self.is_on or threading.get_ident() in self.others:
            return
        if reason := _reason(event, arguments):
            self.refused.append(reason)
            raise pytest.fail.Exception(reason)


_GUARD = _Guard()


@contextmanager
def guarded() -> Iterator[None]:
    """While a unit test runs.

    Raises:
        pytest.fail.Exception: where it starts a process or connects, and at the end if another
            thread did or the test went on.
    """
    _install()
    _GUARD.refused.clear()
    running = {thread.ident for thread in threading.enumerate()}
    _GUARD.others = frozenset(running - {threading.get_ident()})
    _GUARD.is_on = True
    try:
        yield
    finally:
        _GUARD.is_on = False
    if _GUARD.refused:
        pytest.fail(_GUARD.refused[0])


def forgiven() -> list[str]:
    """What was refused until now, which then fails no test."""
    found = list(_GUARD.refused)
    _GUARD.refused.clear()
    return found


@cache
def _install() -> None:
    """An audit hook stays for ever; multiprocessing spawns without an event."""
    sys.addaudithook(_GUARD)
    spawn = multiprocessing.util.spawnv_passfds

    def audited(path: bytes, args: Any, passfds: Any) -> int:
        sys.audit("multiprocessing.spawn", path)
        return spawn(path, args, passfds)

    multiprocessing.util.spawnv_passfds = audited


def _reason(event: str, arguments: tuple[Any, ...]) -> str:
    """Why a unit test may not do this; empty: it may."""
    if event in _STARTS:
        what = f"{event} {arguments[0]!r}" if arguments else event
        return f"a unit test starts a process ({what}): it belongs to tests/system"
    if event == "socket.connect" and isinstance(address := arguments[1], tuple):
        if address[1] in {_REDIS_PORT, *running_ports()}:
            return f"a unit test connects to Redis ({address}): it belongs to tests/integration"
        if not _is_loopback(address[0]):
            return (
                f"a unit test connects to {address}: use a fake on loopback, or tests/integration"
            )
    return ""


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
