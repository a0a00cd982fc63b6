"""Who was heard of lately, by this process's monotonic clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable

__all__ = ["Leases"]


class Leases:
    """Counts each node's lease from the *receipt* of its last heartbeat.

    A node agent counts from *sending*, which is earlier, and stops at `seconds`; here a node is
    lost `margin` later, so it has stopped before its work moves.

    A scheduler that was away (restarted, or frozen) cannot know who was silent: everybody gets one
    full lease from then on.

    Args:
        seconds: lease the node agents were told.
        margin: seconds on top.
        clock: monotonic seconds.
    """

    def __init__(self, seconds: float, margin: float, clock: Callable[[], float]) -> None:
        self._length = seconds + margin
        self._margin = margin
        self._confirmed = clock()
        self._clock = clock
        self._heard: dict[str, float] = {}
        self._watching_since = self._last_look = clock()

    @property
    def trusted(self) -> bool:
        """Whether this scheduler was the newest so lately that none after it has lost a node yet.

        One that took over waits `seconds + margin`; whoever renews a lease `margin` after it was
        last confirmed renews it until then, and no longer.
        """
        return self._clock() - self._confirmed <= self._margin

    def now(self) -> float:
        """Seconds, to be given to `confirm`."""
        return self._clock()

    def confirm(self, asked: float) -> None:
        """The store, asked at `asked`, said that this scheduler is the newest."""
        self._confirmed = max(asked, self._confirmed)

    def renew(self, node_id: str) -> None:
        """A heartbeat of `node_id` came in."""
        self._heard[node_id] = self._clock()

    def expired(self, node_ids: Iterable[str]) -> list[str]:
        """Those of `node_ids` that were silent for too long; ask several times per lease."""
        now = self._clock()
        if now - self._last_look > self._length / 2:
            self._watching_since = now
        self._last_look = now
        limit = now - self._length
        return [
            node_id
            for node_id in node_ids
            if max(self._heard.get(node_id, 0.0), self._watching_since) < limit
        ]
