"""User code that starts processes in every way, and leaves them; run as a child of a test."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

SLEEP = ("sleep", "600")


def sleep() -> None:
    """For long."""
    time.sleep(600)


def _fork() -> None:
    if (pid := os.fork()) == 0:
        sleep()
    _tell(pid)  # a copy of a process with threads may wait for a lock for ever


def _forked_twice() -> None:
    """An orphan in a session of its own."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            _tell(os.getpid())
            sleep()
        os._exit(0)
    while not Path(os.environ["LEFT_FILE"]).exists():  # else it is killed before it has told
        time.sleep(0.01)


def _program() -> None:
    _tell(subprocess.Popen(SLEEP).pid)


def _daemon() -> None:
    _tell(subprocess.Popen(SLEEP, start_new_session=True).pid)


def _pipes() -> None:
    """It holds a pipe that is never read, and has a child of its own."""
    program = ("sh", "-c", "sleep 600 & exec sleep 600")
    _tell(subprocess.Popen(program, stdout=subprocess.PIPE, start_new_session=True).pid)


def _worker() -> None:
    worker = multiprocessing.get_context("fork").Process(target=sleep, daemon=False)
    worker.start()
    _tell(worker.pid or 0)


WAYS: Mapping[str, Callable[[], None]] = {
    "fork": _fork,
    "forked_twice": _forked_twice,
    "program": _program,
    "daemon": _daemon,
    "pipes": _pipes,
    "worker": _worker,
}


def _tell(pid: int) -> None:
    with Path(os.environ["LEFT_FILE"]).open("a") as file:
        file.write(f"{pid}\n")


def reward(task: object, messages: object) -> float:
    """A reward function that leaves a process; "forks" lets the copy return, "never" does not."""
    way = getattr(task, "payload", {}).get("way", "")
    if way == "forks":
        pid = os.fork()
        _tell(pid or os.getpid())
    elif way == "never":
        _tell(os.getpid())
        time.sleep(600)
    elif way:
        WAYS[way]()
    return 1.0


if __name__ == "__main__":
    WAYS[sys.argv[1]]()
    if len(sys.argv) > 2:
        time.sleep(600)
