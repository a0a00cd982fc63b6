"""A clock that gives Unix seconds and never jumps while its process runs."""

from __future__ import annotations

import time


class SteadyClock:
    """Unix seconds as they were at the start, and what the monotonic clock counted since.

    For times that are stored, and so outlive a process, and are compared with each other: after
    somebody sets this machine's clock, nothing is over too early or too late.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        """Seconds since 1970."""
        return self._offset + time.monotonic()
