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

__all__ = [
    "LONG_SHARES",
    "StepLoad",
    "TailSplit",
    "best_split",
    "completion_seconds",
    "quantile",
]

LONG_SHARES = (0.2, 0.1, 0.05, 0.02, 0.01)
"""Shares of the turns that may be the tail; the first is StreamRL's."""
_SURPRISE = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What is to be done, and who does it."""

    num_turns: int
    """Turns that wait and that run (|P|)."""
    num_servers: int
    """Servers (N)."""
    slots: int
    """Turns that a server decodes at once."""
    recent: Sequence[float]
    """Tokens of recent turns, ascending (D)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailSplit:
    """Who decodes the longest turns. The default: all servers decode everything."""

    num_long_turns: int = 0
    """Turns of the tail."""
    num_long_servers: int = 0
    """Servers that are kept for them."""
    long_tokens: float = math.inf
    """Turns above are of the tail."""

    @property
    def turns_per_long_server(self) -> int:
        """How many of them each of these servers is meant to have."""
        return math.ceil(self.num_long_turns / max(self.num_long_servers, 1))


def best_split(
    load: StepLoad, latency: DecodeLatency, long_shares: Sequence[float] = LONG_SHARES
) -> TailSplit:
    """The tail and its servers with which the last turn is thought to end first.

    No tail at all is one of the choices: it is the best where all servers are full for longer than
    the longest turn takes. What is not of the tail may turn out longer than expected, by half.
    """
    most = load.recent[-1] if load.recent else 0.0

    def end(split: TailSplit) -> float:
        at = bisect_right(load.recent, split.long_tokens)
        rest, long = load.recent[:at], load.recent[at:]
        num_rest = load.num_turns - split.num_long_turns
        num_rest_servers = load.num_servers - split.num_long_servers
        longest = min(_SURPRISE * split.long_tokens, most)
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
    """When so many turns, in the mean as long as `recent`, have ended on servers of their own.

    Neither before their work is done, with batches as full as they can be, nor before the longest
    one, begun at once.
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
        # Fewer than `share` where many are equally long: as long as they may be, perhaps.
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
