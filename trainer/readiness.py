"""When a batch will be full, and so when the gang's nodes have to come back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Forecast", "Readiness", "predict_full"]

_LEAST_GROUPS = 4
_WINDOW_SHARE = 0.25
"""The rate is that of the last quarter of a batch: it falls towards the end, with the long tail."""
_LONGEST_LOOK_SECONDS = 20.0
_SHORTEST_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Readiness:
    """How far a batch is."""

    num_ready: int
    """Complete groups that wait for the trainer."""
    needed: int
    """Groups of a batch."""

    @property
    def full(self) -> bool:
        """True when the batch can be leased."""
        return self.num_ready >= self.needed


def predict_full(seen: Sequence[tuple[float, int]], needed: int) -> float | None:
    """When `needed` groups will be ready if they go on at the rate of late.

    Args:
        seen: (seconds, ready groups), in order; the last one is now.
        needed: groups of a batch.

    Returns:
        Seconds on the same clock; None: too little was seen, or the batch is too small to say.
    """
    now, num_ready = seen[-1]
    window = max(_WINDOW_SHARE * needed, 1)
    earlier = [entry for entry in seen if entry[1] <= num_ready - window]
    if needed < _LEAST_GROUPS or 2 * num_ready < needed or not earlier:
        return None
    since, had = earlier[-1]
    return now + (needed - num_ready) * (now - since) / (num_ready - had)


class Forecast:
    """The wait for one batch: when to look again, when to ask ahead, when that was too early.

    WAITING -> ASKED -> GIVEN_BACK: nodes that came back are not worth waiting for without end.

    Args:
        lead_seconds: what the nodes need to come back; 0: never ask ahead.
    """

    def __init__(self, lead_seconds: float) -> None:
        self._lead = lead_seconds
        self._seen: list[tuple[float, int]] = []
        self._begin: float | None = None
        self._end: float | None = None

    def saw(self, now: float, readiness: Readiness) -> None:
        """What was ready at `now`."""
        self._seen.append((now, readiness.num_ready))
        full = predict_full(self._seen, readiness.needed) if self._lead > 0 else None
        if self._end is None:
            self._begin = None if full is None else full - self._lead

    def ask_for(self, now: float) -> float | None:
        """When the nodes have to begin to come back, if that is now; told once."""
        begin = self._begin
        if self._end is not None or begin is None or begin > now:
            return None
        # Back for as long as the way took, and the batch is not full: that was worth a way back.
        self._end = now + 2 * self._lead
        return begin

    def came_too_early(self, now: float) -> bool:
        """Whether the nodes that were asked for have waited for long enough; told once."""
        if self._end is None or now < self._end:
            return False
        self._end = math.inf
        return True

    def look_seconds(self, now: float) -> float:
        """How long to wait for the next group before looking again."""
        due = self._begin if self._end is None else self._end
        if due is None:
            return _LONGEST_LOOK_SECONDS
        return min(max(due - now, _SHORTEST_LOOK_SECONDS), _LONGEST_LOOK_SECONDS)
