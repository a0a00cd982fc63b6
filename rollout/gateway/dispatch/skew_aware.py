"""Skewness-aware dispatch: long turns on separate servers (StreamRL, arXiv 2504.15930, Alg. 2).

A turn decodes more slowly the larger its batch. The longest turns decide when a step ends, and a
batch of many short ones would slow them down.
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
from services.lib.decode_latency import DecodeLatency, MeasuredLatency

_RECENT = 4096
_CONSTANT = DecodeLatency.of({1: 1.0})
"""While nothing is measured."""


class SkewAware:
    """Longest turns first, on separate servers; no server is idle while a turn waits.

    The split is computed from the expected lengths of recent turns and the number of turns now. A
    long turn whose servers are full takes a slot on another one, because the step waits for it. A
    server of the long turns takes short ones only while it has fewer turns than planned. This costs
    throughput: it is for steps that end, not for an endless stream of turns.
    """

    def __init__(self) -> None:
        self._longest_first = LongestFirst()
        self._recent = _Recent(_RECENT)
        self._measured = MeasuredLatency()
        self._split = TailSplit()
        self._long_servers: frozenset[str] = frozenset()

    def split_tail(self, load: StepLoad, latency: DecodeLatency) -> TailSplit:
        """The split with the earliest estimated end of the step."""
        return best_split(load, latency)

    def order(self, turn: TurnRequest) -> float:
        """Like `LongestFirst`."""
        if not turn.continues:
            self._recent.add(turn.expected_tokens)
        return self._longest_first.order(turn)

    def plan(self, pool: PoolSnapshot) -> None:
        """Recompute which turns are long, and how many servers are reserved for them."""
        for server in pool.servers:
            self._measured.add(server.num_turns, server.max_running, server.tokens_per_second)
        load = StepLoad(
            num_turns=pool.num_waiting + sum(server.num_turns for server in pool.servers),
            num_servers=len(pool.servers),
            slots=max(1, min((server.max_running for server in pool.servers), default=1)),
            recent=self._recent.ascending,
        )
        self._split = self.split_tail(load, pool.latency or self._measured.latency or _CONSTANT)
        names = sorted(server.server_id for server in pool.servers)
        # By name, so that few servers change their group when the number changes.
        self._long_servers = frozenset(names[: self._split.num_long_servers])

    def choose(self, turn: TurnRequest, candidates: Sequence[Candidate]) -> Candidate | None:
        """The least loaded server of the turn's group; else another one, or None, as planned."""
        is_long = turn.expected_tokens > self._split.long_tokens
        own = [c for c in candidates if (c.server_id in self._long_servers) == is_long]
        if not own and not is_long and not turn.continues:
            own = [c for c in candidates if c.num_turns < self._split.turns_per_long_server]
            if not own:
                return None
        return least_loaded(own or candidates)


class _Recent:
    """The newest `size` numbers, sorted."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._arrived: deque[float] = deque()
        self.ascending: list[float] = []

    def add(self, number: float) -> None:
        self._arrived.append(number)
        insort(self.ascending, number)
        if len(self._arrived) > self._size:
            del self.ascending[bisect_left(self.ascending, self._arrived.popleft())]
