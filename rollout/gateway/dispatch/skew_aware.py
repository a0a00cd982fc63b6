"""Long turns on servers of their own: skewness-aware dispatch (StreamRL, arXiv 2504.15930, Alg. 2).

A turn decodes slower the more others are decoded beside it. The longest ones decide when a step is
over; among many short ones they would be slowed down by all of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

from rollout.gateway.dispatch.policies import (
    Candidate,
    LongestFirst,
    PoolSnapshot,
    TurnRequest,
    least_loaded,
)
from rollout.gateway.dispatch.tail_split import StepLoad, TailSplit, best_split
from services.lib.decode_latency import DecodeLatency

__all__ = ["MeasuredLatency", "SkewAware"]

_RECENT = 4096
_WEIGHT = 0.1
_CONSTANT = DecodeLatency.of({1: 1.0})


class SkewAware:
    """Longest turns first, on servers of their own; no server is idle while a turn waits.

    How long turns are is learned from those that have come, how many servers the long ones get from
    how many there are now. A long turn that finds all servers of its group full takes a place on
    another one: it is the one that everybody will wait for. A server of the long ones takes other
    turns only while it has fewer than it is meant to have. That costs throughput: it is for steps
    that end, not for an endless stream of turns.
    """

    def __init__(self) -> None:
        self._longest_first = LongestFirst()
        self._recent = _Recent(_RECENT)
        self._measured = MeasuredLatency()
        self._split = TailSplit()
        self._long_servers: frozenset[str] = frozenset()

    def split_tail(self, load: StepLoad, latency: DecodeLatency) -> TailSplit:
        """The tail with which the step is thought to end first."""
        return best_split(load, latency)

    def order(self, turn: TurnRequest) -> float:
        """As `LongestFirst`."""
        if not turn.continues:
            self._recent.add(turn.expected_tokens)
        return self._longest_first.order(turn)

    def plan(self, pool: PoolSnapshot) -> None:
        """Decide anew which turns are long, and how many servers are kept for them."""
        self._measured.see(pool.servers)
        load = StepLoad(
            num_turns=pool.num_waiting + sum(server.num_turns for server in pool.servers),
            num_servers=len(pool.servers),
            slots=max(1, min((server.max_running for server in pool.servers), default=1)),
            recent=self._recent.ascending,
        )
        self._split = self.split_tail(load, pool.latency or self._measured.latency())
        names = sorted(server.server_id for server in pool.servers)
        # By name: as few as can be change their group when the number changes.
        self._long_servers = frozenset(names[: self._split.num_long_servers])

    def choose(self, turn: TurnRequest, candidates: Sequence[Candidate]) -> Candidate | None:
        """The least loaded server of the turn's group, if one has room."""
        is_long = turn.expected_tokens > self._split.long_tokens
        own = [c for c in candidates if (c.server_id in self._long_servers) == is_long]
        if not own and not is_long and not turn.continues:
            own = [c for c in candidates if c.num_turns < self._split.turns_per_long_server]
            if not own:
                return None
        return least_loaded(own or candidates)


class MeasuredLatency:
    """Decode latency as servers report it: by powers of two of their load, smoothed."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def see(self, servers: Sequence[Candidate]) -> None:
        """Take in what servers report now; those that do not know their rate tell nothing."""
        for server in servers:
            batch = min(server.num_turns, server.max_running or server.num_turns)
            if not batch or not server.tokens_per_second > 0:
                continue
            point = 1 << (batch.bit_length() - 1)
            seconds = batch / server.tokens_per_second
            before = self._seconds.setdefault(point, seconds)
            self._seconds[point] = before + _WEIGHT * (seconds - before)

    def latency(self) -> DecodeLatency:
        """What was seen, made so that a larger batch is never faster; constant: nothing yet."""
        table: dict[int, float] = {}
        slowest = 0.0
        for batch in sorted(self._seconds):
            slowest = table[batch] = max(slowest, self._seconds[batch])
        return DecodeLatency.of(table) if table else _CONSTANT


class _Recent:
    """The newest numbers, sorted."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._arrived: deque[float] = deque()
        self.ascending: list[float] = []

    def add(self, number: float) -> None:
        self._arrived.append(number)
        insort(self.ascending, number)
        if len(self._arrived) > self._size:
            del self.ascending[bisect_left(self.ascending, self._arrived.popleft())]
