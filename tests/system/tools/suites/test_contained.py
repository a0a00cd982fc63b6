"""A suite that ends, however it ends, leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

# It starts a program that leaves its session and changes its name, as SGLang's processes do.
_COMMAND = """
import os, subprocess, sys, time
left = subprocess.Popen(["sleep", "600"], start_new_session=True)
with open(sys.argv[1] + ".partial", "w") as file:
    file.write(f"{os.getpid()} {left.pid}")
os.rename(sys.argv[1] + ".partial", sys.argv[1])
time.sleep(float(sys.argv[2]))
sys.exit(7)
"""

CONTAINED = (sys.executable, "-m", "tools.suites.contained")


def start(file: Path, seconds: float, *contained: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A command within `contained`, and the ids of what it started."""
    command = [*contained, sys.executable, "-c", _COMMAND, str(file), str(seconds)]
    process = subprocess.Popen(command, start_new_session=True)
    while not file.exists():
        assert process.poll() is None
        time.sleep(0.02)
    return process, [int(pid) for pid in file.read_text().split()]


def lives(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def wait_until_gone(pids: list[int]) -> bool:
    """Whether all have ended within half a minute."""
    for _ in range(1500):
        if not any(map(lives, pids)):
            return True
        time.sleep(0.02)
    return False


def test_what_a_command_left_ends_with_it_and_its_exit_code_stays(tmp_path: Path) -> None:
    """Also a program in a session of its own."""
    process, started = start(tmp_path / "pids", 0.1, *CONTAINED)
    assert process.wait() == 7
    assert wait_until_gone(started)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("victim", ["first", "second"])
def test_nothing_is_left_when_it_is_killed(tmp_path: Path, victim: str, number: int) -> None:
    """Either of the two processes, by either signal."""
    process, started = start(tmp_path / "pids", 600, *CONTAINED)
    second = psutil.Process(process.pid).children()[0].pid
    os.kill(process.pid if victim == "first" else second, number)
    assert process.wait() != 0
    assert wait_until_gone([second, *started])


def test_without_it_the_program_would_stay(tmp_path: Path) -> None:
    """Negative control."""
    process, started = start(tmp_path / "pids", 0.1)
    assert process.wait() == 7
    assert lives(started[1])
    os.kill(started[1], signal.SIGKILL)
