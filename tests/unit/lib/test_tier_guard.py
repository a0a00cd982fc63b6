"""The guard of the unit tests, which is on while these run."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.lib.tier_guard import forgiven, guarded

_TRUE = [sys.executable, "-c", ""]


def fork() -> None:
    """Which no child survives."""
    if os.fork() == 0:
        os._exit(0)


def spawn() -> None:
    """By `multiprocessing`."""
    multiprocessing.get_context("spawn").Process(target=print).start()


@pytest.mark.parametrize(
    "start",
    [
        lambda: subprocess.run(_TRUE, check=True),
        lambda: os.system("true"),
        lambda: os.posix_spawn(_TRUE[0], _TRUE, {}),
        lambda: os.execv(_TRUE[0], _TRUE),
        fork,
        spawn,
    ],
    ids=["subprocess", "system", "posix_spawn", "exec", "fork", "multiprocessing"],
)
def test_a_process_is_refused(start: Callable[[], object]) -> None:
    """The message names the tier that the test belongs to."""
    with pytest.raises(pytest.fail.Exception, match="tests/system"):
        start()
    assert forgiven()


@pytest.mark.parametrize(
    ("address", "cure"),
    [(("127.0.0.1", 6379), "tests/integration"), (("192.0.2.1", 80), "fake on loopback")],
)
def test_redis_and_other_machines_are_refused(address: tuple[str, int], cure: str) -> None:
    """192.0.2.0/24 is no network."""
    with socket.socket() as client, pytest.raises(pytest.fail.Exception, match=cure):
        client.connect(address)
    assert forgiven()


def test_a_redis_of_the_tests_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On whichever port it listens."""
    monkeypatch.setattr("tests.lib.redis_server._RUNNING", {1})
    with socket.socket() as client, pytest.raises(pytest.fail.Exception, match="Redis"):
        client.connect(("127.0.0.1", 1))
    assert forgiven()


def test_a_server_in_this_process_is_reached() -> None:
    """Loopback is free, but for Redis."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
    assert forgiven() == []


def test_a_thread_that_another_test_left_is_not_this_tests() -> None:
    """Else whoever comes after it would be blamed."""
    go, done = threading.Event(), []

    def start() -> None:
        go.wait()
        done.append(subprocess.run(_TRUE, check=True).returncode)

    thread = threading.Thread(target=start)
    thread.start()
    with guarded():
        go.set()
        thread.join()
    assert (done, forgiven()) == ([0], [])


def test_what_another_thread_does_fails_the_test() -> None:
    """And so does an error that the test catches."""

    def start() -> None:
        with suppress(pytest.fail.Exception):
            subprocess.run(_TRUE, check=True)

    with pytest.raises(pytest.fail.Exception, match="tests/system"), guarded():
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
    forgiven()
