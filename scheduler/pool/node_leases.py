"""Node leases, by last heartbeat on the monotonic clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class NodeLeases:
    """Counts each node's lease from the *receipt* of its last heartbeat.

    A node agent counts from *sending*, which is earlier, and stops at `seconds`; here a node is
    lost `margin` later, so it has stopped before its work moves.

    After the scheduler was restarted or frozen, every node gets one full lease, as heartbeats may
    have been missed.

    Args:
        seconds: lease of the node agents.
        margin: additional seconds.
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
        """Whether heartbeats may renew leases: the store confirmed this scheduler recently.

        A newer scheduler loses no node for `seconds + margin`, so a lease renewed within `margin`
        of the last confirmation ends before that.
        """
        return self._clock() - self._confirmed <= self._margin

    def now(self) -> float:
        """Seconds, the argument of `confirm`."""
        return self._clock()

    def confirm(self, query_time: float) -> None:
        """The store, queried at `query_time`, confirmed that this scheduler is the newest."""
        self._confirmed = max(query_time, self._confirmed)

    def renew(self, node_id: str) -> None:
        """Renew the lease of a node after its heartbeat."""
        self._heard[node_id] = self._clock()

    def expired(self, node_ids: Iterable[str]) -> list[str]:
        """The nodes of `node_ids` whose lease expired; to be called several times per lease."""
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
