"""Standard output that may be closed, or lie on a full disk, while the run goes on."""

from __future__ import annotations

import errno
import os
import sys
from typing import TextIO

_CLOSED = (errno.EPIPE, errno.EIO, errno.EBADF)


class SurvivingOutput:
    """A text stream to which writing never fails.

    What is written after the reader has gone (`seamflow train | head`, a terminal that was closed)
    goes to /dev/null; what a full disk refuses is tried again with what is written next.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write as the stream does; `len(text)` where it cannot."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        """Flush as the stream does."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        if error.errno not in _CLOSED:
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def survive_closed_output() -> None:
    """Let standard output and standard error of this process be of that kind."""
    sys.stdout = SurvivingOutput(sys.stdout)
    sys.stderr = SurvivingOutput(sys.stderr)
