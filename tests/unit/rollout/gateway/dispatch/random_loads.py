"""Random loads and decode latencies for tests of tail splits."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rollout.gateway.dispatch.skew_aware import StepLoad
from services.lib.decode_latency import DecodeLatency


def instance(seed: int) -> tuple[StepLoad, DecodeLatency]:
    """Turns, servers and a pace at random."""
    draw = random.Random(seed)
    step, table = 0.01, {}
    for batch in sorted(draw.sample(range(1, 300), draw.randint(1, 5))):
        step *= 1 + draw.random()
        table[batch] = step
    recent = sorted(draw.lognormvariate(6, 1) for _ in range(draw.randint(1, 60)))
    load = StepLoad(
        num_turns=draw.randint(0, 400),
        num_servers=draw.randint(1, 24),
        slots=draw.randint(1, 64),
        recent=recent,
    )
    return load, DecodeLatency.of(table)


def least_at_or_above(share: float, numbers: Sequence[float]) -> float:
    """The least number that at least this share of all is not above."""
    return min(n for n in numbers if sum(m <= n for m in numbers) >= share * len(numbers))
