"""How much of what its nodes can sample a run samples, from the rates that they report.

Training that is slower than generation throttles it: the bound on staleness lets no new rollout
begin. Then T_gen, had it not waited, is the time of a batch times this share.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from statistics import fmean

from scheduler.model.records import ROLLOUT, Node

_KEPT = 1024
"""Newest rates of a node."""
_FULL = 0.9
"""Quantile of the rates above zero that counts as a node's full rate: single ones are noisy."""
_BATCHES = 4
"""The full rate is that of as long a time as the newest such periods: longer rollouts lower it."""

_Rates = deque[tuple[float, float]]


class GenerationLoad:
    """Kept in memory: after a restart generation counts as fully loaded until rates have come."""

    def __init__(self) -> None:
        self._rates: dict[str, _Rates] = defaultdict(lambda: deque(maxlen=_KEPT))

    def observe(self, node: Node, now: float) -> None:
        """A node has reported, at `now`, seconds since 1970."""
        if node.report is not None and node.assignment.tag == ROLLOUT and node.taken_up:
            self._rates[node.node_id].append((now, node.report.tokens_per_second))

    def share(self, node_ids: Iterable[str], since: float, until: float) -> float:
        """Sampled tokens of these nodes between two times, in those at their full rates.

        1 if not known.
        """
        sampled = full = 0.0
        for node_id in node_ids:
            rates = self._rates.get(node_id, ())
            within = [rate for time, rate in rates if since <= time <= until]
            recent = until - _BATCHES * (until - since)
            above = sorted(rate for time, rate in rates if rate > 0 and time >= recent)
            if within and above:
                sampled += fmean(within)
                full += above[int(_FULL * (len(above) - 1))]
        return min(sampled / full, 1.0) if full else 1.0
