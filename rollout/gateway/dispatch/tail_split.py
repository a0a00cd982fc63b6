"""Which turns are the tail of a step, and how many servers they get: pure functions.

After Alg. 2 of StreamRL (arXiv 2504.15930, section on skewness-aware dispatch), which estimates
each group by a typical turn; `best_split` estimates it by its longest. `bench.rollout.streamrl`
has the algorithm as printed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.lib.decode_latency import DecodeLatency

LONG_SHARES = (0.2, 0.1, 0.05, 0.02, 0.01)
"""Candidate shares of the turns that form the tail; the first is StreamRL's."""
_UNDERESTIMATE = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """Turns and servers of a step."""

    num_turns: int
    """Waiting and running turns (|P|)."""
    num_servers: int
    """Servers (N)."""
    slots: int
    """Turns that a server decodes concurrently."""
    recent: Sequence[float]
    """Expected tokens of recent turns, ascending (D)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailSplit:
    """Servers reserved for the longest turns. The default reserves none."""

    num_long_turns: int = 0
    """Turns of the tail."""
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
