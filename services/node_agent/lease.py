"""The node agent's own view of its lease."""

from __future__ import annotations

from collections.abc import Callable


class Lease:
    """Lease, counted from *sending* an answered request, so it ends before the scheduler's.

    Args:
        clock: monotonic seconds; must advance while the process is frozen.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._end = clock()
        self.seconds = 0.0
        """Its duration, set by the scheduler at registration."""

    def begin(self, sent: float, seconds: float) -> None:
        """The registration sent at `sent` was answered with a lease of `seconds`."""
        self.seconds = seconds
        self._end = sent + seconds

    def renew(self, sent: float) -> None:
        """The heartbeat sent at `sent` was answered."""
        self._end = sent + self.seconds

    @property
    def remaining(self) -> float:
        """Seconds left; at most 0 when it has expired."""
        return self._end - self._clock()
