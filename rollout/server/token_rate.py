"""Tokens per second over the last seconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class TokenRate:
    """A sliding window over whole seconds: cheap to update at each step, 0 when idle."""

    def __init__(
        self, window_seconds: int = 5, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._window = window_seconds
        self._clock = clock
        self._seconds: deque[tuple[int, int]] = deque(maxlen=window_seconds + 1)

    def add(self, tokens: int) -> None:
        """Count `tokens` as sampled now."""
        second = int(self._clock())
        if self._seconds and self._seconds[-1][0] == second:
            tokens += self._seconds.pop()[1]
        self._seconds.append((second, tokens))

    def per_second(self) -> float:
        """Mean rate over the window, 0 when nothing was sampled in it."""
        now = self._clock()
        recent = [(s, n) for s, n in list(self._seconds) if s > now - self._window - 1]
        if not recent:
            return 0.0
        return sum(n for _, n in recent) / max(1.0, now - recent[0][0])
