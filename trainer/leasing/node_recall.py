"""When a waiting trainer requests its lent nodes back: so that they return as its batch fills."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainer.data.batch_progress import BatchProgress, BatchTimeout

_MIN_GROUPS = 4
_WINDOW_SHARE = 0.25
"""The rate is that of the last quarter of a batch: it falls towards the end, with the long tail."""
_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.05, 20.0


def predict_full(history: Sequence[tuple[float, int]], needed: int) -> float | None:
    """When `needed` groups will be ready, extrapolating the most recent rate.

    Args:
        history: (seconds, ready groups) in order; the last entry is now.
        needed: groups of a batch.

    Returns:
        Seconds on the same clock; None: the history or the batch is too small for a prediction.
    """
    now, num_ready = history[-1]
    window = max(_WINDOW_SHARE * needed, 1)
    earlier = [entry for entry in history if entry[1] <= num_ready - window]
    if needed < _MIN_GROUPS or 2 * num_ready < needed or not earlier:
        return None
    since, had = earlier[-1]
    return now + (needed - num_ready) * (now - since) / (num_ready - had)


class NodeRecall:
    """Decides, during the wait for one batch, when to request nodes and when to release them again.

    WAITING -> REQUESTED -> RELEASED: nodes that returned too early do not wait indefinitely.

    Args:
        return_seconds: time the nodes need to return; 0: never request them ahead.
        timeout: when the wait ends with a partial batch.
    """

    def __init__(self, return_seconds: float, timeout: BatchTimeout) -> None:
        self._return_seconds = return_seconds
        self._timeout = timeout
        self._history: list[tuple[float, int]] = []
        self._request_time = math.inf
        self._release_time: float | None = None

    def observe(self, now: float, progress: BatchProgress) -> None:
        """Record the progress at `now` and predict when to request the nodes."""
        self._history.append((now, progress.num_ready))
        if self._return_seconds > 0 and self._release_time is None:
            full = predict_full(self._history, progress.start)
            partial = self._timeout.start_time(progress)
            start = partial if full is None else min(full, partial)
            self._request_time = start - self._return_seconds

    def take_request(self, now: float) -> bool:
        """Whether the time has come from which the nodes must return; true once."""
        if self._release_time is not None or self._request_time > now:
            return False
        # Idle for as long as the way back took: by then, releasing the nodes again pays.
        self._release_time = now + 2 * self._return_seconds
        return True

    def take_release(self, now: float) -> bool:
        """Whether the requested nodes came too early and must be released again; true once."""
        if self._release_time is None or now < self._release_time:
            return False
        self._release_time = math.inf
        return True

    def poll_seconds(self, now: float) -> float:
        """How long to wait for the next group before deciding again."""
        due = self._request_time if self._release_time is None else self._release_time
        if self._timeout.time > now:
            due = min(due, self._timeout.time)
        return min(max(due - now, _MIN_POLL_SECONDS), _MAX_POLL_SECONDS)
