"""Skewness-aware dispatch: long turns on separate servers (StreamRL, arXiv 2504.15930, Alg. 2).

A turn decodes more slowly the larger its batch. The longest turns decide when a step ends, and a
batch of many short ones would slow them down.

StreamRL estimates each group by a typical turn; `best_split` estimates it by its longest.
`bench.rollout.streamrl` has the algorithm as printed.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollout.gateway.dispatch.policies import (
    Candidate,
    LongestFirst,
    PoolSnapshot,
    TurnRequest,
    least_loaded,
)
from services.chassis import metrics
from services.lib.decode_latency import DecodeLatency, MeasuredLatency

LONG_SHARES = (0.2, 0.1, 0.05, 0.02, 0.01)
"""Candidate shares of the turns that form the tail; the first is StreamRL's."""
_UNDERESTIMATE = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    num_turns: int
    """Waiting and running turns (|P|)."""
    num_servers: int
    slots: int
    """Turns that a server decodes concurrently."""
    recent: Sequence[float]
    """Expected tokens of recent turns, ascending (D)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailSplit:
    """Servers reserved for the longest turns. The default reserves none."""

    num_long_turns: int = 0
    num_long_servers: int = 0
    """Servers reserved for it."""
    long_tokens: float = math.inf
    """Turns with more tokens belong to the tail."""

    @property
    def turns_per_long_server(self) -> int:
        """Planned number of tail turns on each reserved server."""
        return math.ceil(self.num_long_turns / max(self.num_long_servers, 1))


def best_split(
    load: StepLoad, latency: DecodeLatency, long_shares: Sequence[float] = LONG_SHARES
) -> TailSplit:
    """The split with the earliest estimated end of the last turn.

    No tail is a candidate too: it is best where all servers stay full for longer than the longest
    turn takes. Turns outside the tail are assumed to be up to 1.5 times as long as expected.
    """
    most = load.recent[-1] if load.recent else 0.0

    def end(split: TailSplit) -> float:
        at = bisect_right(load.recent, split.long_tokens)
        rest, long = load.recent[:at], load.recent[at:]
        num_rest = load.num_turns - split.num_long_turns
        num_rest_servers = load.num_servers - split.num_long_servers
        longest = min(_UNDERESTIMATE * split.long_tokens, most)
        return max(
            completion_seconds(num_rest, rest, longest, num_rest_servers, load.slots, latency),
            completion_seconds(
                split.num_long_turns, long, most, split.num_long_servers, load.slots, latency
            ),
        )

    return min(_splits(load, long_shares), key=end)


def completion_seconds(
    num_turns: int,
    recent: Sequence[float],
    longest: float,
    num_servers: int,
    slots: int,
    latency: DecodeLatency,
) -> float:
    """Seconds until `num_turns` turns with the mean length of `recent` end on separate servers.

    The maximum of the total work in full batches and of the longest turn, started immediately.
    """
    if not num_turns or not num_servers or not recent:
        return 0.0
    batch = max(min(num_turns / num_servers, slots), 1.0)
    steps = num_turns * sum(recent) / len(recent) / (num_servers * batch)
    return latency.seconds(batch) * max(steps, longest)


def _splits(load: StepLoad, long_shares: Sequence[float]) -> Iterator[TailSplit]:
    yield TailSplit()
    for share in long_shares if load.recent else ():
        long_tokens = quantile(load.recent, 1 - share)
        # Fewer than `share` where many turns have the same expected length.
        num_above = len(load.recent) - bisect_right(load.recent, long_tokens)
        num_long = math.floor(load.num_turns * num_above / len(load.recent))
        if not num_long:
            continue
        for num_long_servers in range(1, load.num_servers):
            yield TailSplit(
                num_long_turns=num_long,
                num_long_servers=num_long_servers,
                long_tokens=long_tokens,
            )


def quantile(ascending: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of `ascending` does not exceed."""
    return ascending[max(math.ceil(share * len(ascending)), 1) - 1]


_RECENT = 4096
_LONG_TURNS = metrics.counter(
    "rollout_gateway", "long_turns_total", "Long turns placed on servers that are kept for them."
)
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
        chosen = least_loaded(own or candidates)
        if is_long and chosen.server_id in self._long_servers:
            _LONG_TURNS.inc()
        return chosen


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
