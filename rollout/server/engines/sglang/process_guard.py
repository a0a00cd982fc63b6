"""Run a command, and kill its process group when the parent process has exited.

    python process_guard.py COMMAND...

Standard input is a pipe without a writer: it ends when the process that holds its other end
dies, by whatever signal. PR_SET_PDEATHSIG would need code between fork and exec, which is not safe
in a process with threads, and would reach the first child only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from types import FrameType

NOT_FOUND = 127
"""Exit code for a command that does not exist, as in a shell."""
BY_SIGNAL = 128
"""Added to the number of the signal that ended a command, as in a shell."""


def main(command: list[str]) -> int:
    """Run `command` in our process group; returns its exit code."""
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", flush=True)
        return NOT_FOUND

    def forward(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    threading.Thread(target=_watch, daemon=True).start()
    code = child.wait()
    return BY_SIGNAL - code if code < 0 else code


def _watch() -> None:
    while os.read(0, 1024):  # unbuffered: a buffer is locked when the interpreter shuts down
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
