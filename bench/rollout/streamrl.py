"""Skewness-aware dispatch as StreamRL prints it (arXiv 2504.15930, Alg. 2), to compare with ours.

The product's `skew_aware` estimates each group of turns by its longest turn; Alg. 2 by a typical
one, and its tail is always the longest fifth.
"""

from __future__ import annotations

import math
from typing import Literal

from rollout.gateway.dispatch.skew_aware import (
    LONG_SHARES,
    SkewAware,
    StepLoad,
    TailSplit,
    quantile,
)
from services.lib.decode_latency import DecodeLatency

Objective = Literal["sum", "max"]
"""What to minimise: the sum of both groups' times, as printed, or the later of them."""


class SkewAwareSum(SkewAware):
    """Alg. 2 as printed: the longest fifth, and the smallest sum of both groups' times."""

    objective: Objective = "sum"

    def split_tail(self, load: StepLoad, latency: DecodeLatency) -> TailSplit:
        """Alg. 2."""
        return split_as_printed(load, latency, self.objective)


class SkewAwareMax(SkewAwareSum):
    """Alg. 2 with the later of both groups' times, which is when the step is over."""

    objective: Objective = "max"


def split_as_printed(
    load: StepLoad, latency: DecodeLatency, objective: Objective, long_share: float = LONG_SHARES[0]
) -> TailSplit:
    """Alg. 2: the number of servers for the longest `long_share` that minimises the objective.

    A turn of the tail is assumed to be as long as the middle of it (P90 of all for the longest
    fifth), any other one as P50. Of equally good splits the one with the better other objective is
    taken, then the one with fewer servers for the tail.
    """
    num_long = math.floor(long_share * load.num_turns)
    if load.num_servers < 2 or not num_long or not load.recent:
        return TailSplit()
    long_tokens, rest_tokens = (quantile(load.recent, q) for q in (1 - long_share / 2, 0.5))

    def cost(num_long_servers: int) -> tuple[float, float]:
        num_rest_servers = load.num_servers - num_long_servers
        num_rest = load.num_turns - num_long
        long = group_seconds(num_long, long_tokens, num_long_servers, load.slots, latency)
        rest = group_seconds(num_rest, rest_tokens, num_rest_servers, load.slots, latency)
        both = (long + rest, max(long, rest))
        return both if objective == "sum" else both[::-1]

    return TailSplit(
        num_long_turns=num_long,
        num_long_servers=min(range(1, load.num_servers), key=cost),
        long_tokens=quantile(load.recent, 1 - long_share),
    )


def group_seconds(
    num_turns: int, tokens: float, num_servers: int, slots: int, latency: DecodeLatency
) -> float:
    """Latency(M, L, N) = PTL(BS) · L · ⌈M / BS⌉, with M turns on each of N servers."""
    of_each = math.ceil(num_turns / num_servers)
    batch = max(min(of_each, slots), 1)
    return latency.seconds(batch) * tokens * math.ceil(of_each / batch)
