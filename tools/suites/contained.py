"""`python -m tools.suites.contained COMMAND...`: run a command; whatever it started ends with it.

Two processes watch each other, so that a SIGKILL of either one leaves nothing running: the first
waits for the second, which runs the command and gets SIGTERM when the first one ends.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from seamflow.processes.left_processes import MARK, end_left

_PR_SET_PDEATHSIG = 1


def contained(command: Sequence[str]) -> int:
    """Run a command with its own standard streams; its exit code, or 128 + a signal's number.

    SIGTERM and SIGINT end the command and all that it started.
    """
    mark = secrets.token_hex(16)
    os.environ[MARK] = f"{os.environ.get(MARK, '')} {mark}".strip()
    watched = os.getpid()
    if (child := os.fork()) == 0:
        os._exit(_run(command, mark, watched))
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(child, number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the child too
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    end_left(mark)
    return code if code >= 0 else 128 - code


def _run(command: Sequence[str], mark: str, parent: int) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: _end(number, frame, mark))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before that
        return 1
    code = subprocess.run(command, check=False).returncode
    return code if code >= 0 else 128 - code


def _end(number: int, _frame: FrameType | None, mark: str) -> None:
    """The other process has this mark too: it kills what is left, or has ended itself."""
    end_left(mark)
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(contained(sys.argv[1:]))
