"""Which turns are the tail of a step, and how many servers they get: decisions, no state.

`isolate_tail` is Alg. 2 of StreamRL (arXiv 2504.15930, section on skewness-aware dispatch) as
printed: its times are those of typical turns. `earliest_end` searches with those of the longest.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from services.lib.decode_latency import DecodeLatency

__all__ = [
    "LONG_SHARES",
    "Load",
    "Objective",
    "Split",
    "earliest_end",
    "group_end",
    "group_seconds",
    "isolate_tail",
]

Objective = Literal["sum", "max"]
"""What to minimise: the sum of both groups' times, as printed, or the later of them."""

LONG_SHARES = (0.2, 0.1, 0.05, 0.02, 0.01)
"""Shares of the turns that may be the tail; the first is StreamRL's."""
_SURPRISE = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
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
class Split:
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


def isolate_tail(
    load: Load, latency: DecodeLatency, objective: Objective, long_share: float = LONG_SHARES[0]
) -> Split:
    """Alg. 2: the number of servers for the longest `long_share` that is best for all turns.

    A turn of the tail is taken to be as long as the middle of it (P90 of all for the longest
    fifth), any other one as P50. Of equally good splits the one with the better other objective is
    taken, then the one with fewer servers for the tail.
    """
    num_long = math.floor(long_share * load.num_turns)
    if load.num_servers < 2 or not num_long or not load.recent:
        return Split()
    long_tokens, rest_tokens = (_quantile(load.recent, q) for q in (1 - long_share / 2, 0.5))

    def cost(num_long_servers: int) -> tuple[float, float]:
        num_rest_servers = load.num_servers - num_long_servers
        num_rest = load.num_turns - num_long
        long = group_seconds(num_long, long_tokens, num_long_servers, load.slots, latency)
        rest = group_seconds(num_rest, rest_tokens, num_rest_servers, load.slots, latency)
        both = (long + rest, max(long, rest))
        return both if objective == "sum" else both[::-1]

    return Split(
        num_long_turns=num_long,
        num_long_servers=min(range(1, load.num_servers), key=cost),
        long_tokens=_quantile(load.recent, 1 - long_share),
    )


def group_seconds(
    num_turns: int, tokens: float, num_servers: int, slots: int, latency: DecodeLatency
) -> float:
    """Latency(M, L, N) = PTL(BS) · L · ⌈M / BS⌉, with M turns on each of N servers."""
    of_each = math.ceil(num_turns / num_servers)
    batch = max(min(of_each, slots), 1)
    return latency.seconds(batch) * tokens * math.ceil(of_each / batch)


def earliest_end(
    load: Load, latency: DecodeLatency, long_shares: Sequence[float] = LONG_SHARES
) -> Split:
    """The tail and its servers with which the last turn is thought to end first.

    No tail at all is one of the choices: it is the best where all servers are full for longer than
    the longest turn takes. What is not of the tail may turn out longer than expected, by half.
    """
    most = load.recent[-1] if load.recent else 0.0

    def end(split: Split) -> float:
        at = bisect_right(load.recent, split.long_tokens)
        rest, long = load.recent[:at], load.recent[at:]
        num_rest = load.num_turns - split.num_long_turns
        num_rest_servers = load.num_servers - split.num_long_servers
        longest = min(_SURPRISE * split.long_tokens, most)
        return max(
            group_end(num_rest, rest, longest, num_rest_servers, load.slots, latency),
            group_end(
                split.num_long_turns, long, most, split.num_long_servers, load.slots, latency
            ),
        )

    return min(_splits(load, long_shares), key=end)


def group_end(
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


def _splits(load: Load, long_shares: Sequence[float]) -> Iterator[Split]:
    yield Split()
    for share in long_shares if load.recent else ():
        long_tokens = _quantile(load.recent, 1 - share)
        # Fewer than `share` where many are equally long: as long as they may be, perhaps.
        num_above = len(load.recent) - bisect_right(load.recent, long_tokens)
        num_long = math.floor(load.num_turns * num_above / len(load.recent))
        if not num_long:
            continue
        for num_long_servers in range(1, load.num_servers):
            yield Split(
                num_long_turns=num_long,
                num_long_servers=num_long_servers,
                long_tokens=long_tokens,
            )


def _quantile(ascending: Sequence[float], share: float) -> float:
    """The least of them that so many are not above."""
    return ascending[max(math.ceil(share * len(ascending)), 1) - 1]
