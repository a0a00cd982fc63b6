"""When a trainer has waited enough for a batch, and so when its gang's nodes have to come back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BatchTimeout", "Forecast", "Readiness", "predict_full"]

_LEAST_GROUPS = 4
_WINDOW_SHARE = 0.25
"""The rate is that of the last quarter of a batch: it falls towards the end, with the long tail."""
_LONGEST_LOOK_SECONDS = 20.0
_SHORTEST_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Readiness:
    """How far a batch is."""

    num_ready: int
    """Complete groups that the trainer may lease."""
    needed: int
    """Groups of a batch."""
    stream: int = 0
    """Groups with which training on a part of it begins; 0: it begins with all."""

    @property
    def begin(self) -> int:
        """Groups with which training begins."""
        return min(self.stream or self.needed, self.needed)

    @property
    def full(self) -> bool:
        """True when the batch can be leased."""
        return self.num_ready >= self.needed


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTimeout:
    """From when on part of a batch is enough.

    SeamlessFlow (arXiv 2508.11553) interrupts rollout by batch size or by timeout.
    """

    time: float = math.inf
    """Seconds on the caller's clock; inf: never."""
    min_groups: int = 1
    """Complete groups that a part has at least."""

    def enough(self, now: float, ready: Readiness) -> bool:
        """Whether training can begin: on a batch, the begin of one, or a part once it is time."""
        enough = ready.num_ready >= ready.begin
        return enough or (now >= self.time and ready.num_ready >= self.min_groups)

    def expected(self, ready: Readiness) -> float:
        """When `ready` is enough though nothing else comes; inf: never."""
        return self.time if ready.num_ready >= self.min_groups else math.inf


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
        timeout: when the wait ends though the batch is not full.
    """

    def __init__(self, lead_seconds: float, timeout: BatchTimeout) -> None:
        self._lead = lead_seconds
        self._timeout = timeout
        self._seen: list[tuple[float, int]] = []
        self._begin = math.inf
        self._end: float | None = None

    def saw(self, now: float, readiness: Readiness) -> None:
        """What was ready at `now`."""
        self._seen.append((now, readiness.num_ready))
        if self._lead > 0 and self._end is None:
            full = predict_full(self._seen, readiness.begin)
            part = self._timeout.expected(readiness)
            self._begin = (part if full is None else min(full, part)) - self._lead

    def ask_for(self, now: float) -> float | None:
        """When the nodes have to begin to come back, if that is now; told once."""
        if self._end is not None or self._begin > now:
            return None
        # Back for as long as the way took, and the batch is not full: that was worth a way back.
        self._end = now + 2 * self._lead
        return self._begin

    def came_too_early(self, now: float) -> bool:
        """Whether the nodes that were asked for have waited for long enough; told once."""
        if self._end is None or now < self._end:
            return False
        self._end = math.inf
        return True

    def look_seconds(self, now: float) -> float:
        """How long to wait for the next group before looking again."""
        due = self._begin if self._end is None else self._end
        if self._timeout.time > now:
            due = min(due, self._timeout.time)
        return min(max(due - now, _SHORTEST_LOOK_SECONDS), _LONGEST_LOOK_SECONDS)
