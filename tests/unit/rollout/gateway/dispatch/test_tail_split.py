"""The number of servers for the tail, compared with brute force on random instances."""

from __future__ import annotations

import math

import pytest

from rollout.gateway.dispatch.skew_aware import (
    LONG_SHARES,
    StepLoad,
    TailSplit,
    best_split,
    completion_seconds,
)
from services.lib.decode_latency import DecodeLatency
from tests.unit.rollout.gateway.dispatch.random_loads import instance, least_at_or_above

STREAMRL = DecodeLatency.of({1: 0.0085, 8: 0.0085, 32: 0.010, 64: 0.0115, 128: 0.015, 256: 0.021})


def end_of(load: StepLoad, latency: DecodeLatency, split: TailSplit) -> float:
    """When the later group ends, with the lengths of each summed up one by one."""
    long = [tokens for tokens in load.recent if tokens > split.long_tokens]
    rest = [tokens for tokens in load.recent if tokens <= split.long_tokens]
    most = max(load.recent)
    ends = [
        completion_seconds(
            load.num_turns - split.num_long_turns,
            rest,
            min(1.5 * split.long_tokens, most),
            load.num_servers - split.num_long_servers,
            load.slots,
            latency,
        ),
        completion_seconds(
            split.num_long_turns, long, most, split.num_long_servers, load.slots, latency
        ),
    ]
    return max(ends)


def test_no_tail_ends_the_step_earlier() -> None:
    """On 1,000 instances: over all shares and numbers of servers, and none at all."""
    for seed in range(1000):
        load, latency = instance(seed)
        options = [TailSplit()]
        for share in LONG_SHARES:
            long_tokens = least_at_or_above(1 - share, load.recent)
            above = sum(tokens > long_tokens for tokens in load.recent) / len(load.recent)
            if num_long := math.floor(load.num_turns * above + 1e-9):
                options += [
                    TailSplit(
                        num_long_turns=num_long, num_long_servers=number, long_tokens=long_tokens
                    )
                    for number in range(1, load.num_servers)
                ]
        best = min(end_of(load, latency, option) for option in options)
        assert end_of(load, latency, best_split(load, latency)) == pytest.approx(best)


def test_where_all_servers_are_full_for_long_nothing_is_isolated() -> None:
    """Throughput decides, not the longest turn."""
    recent = [float(tokens) for tokens in range(900, 1100)]
    load = StepLoad(num_turns=100_000, num_servers=8, slots=64, recent=recent)
    assert best_split(load, STREAMRL) == TailSplit()


def test_few_very_long_turns_get_separate_servers() -> None:
    """Fewer turns on each of these than on the others."""
    recent = sorted([1000.0] * 190 + [20_000.0] * 10)
    load = StepLoad(num_turns=2000, num_servers=16, slots=128, recent=recent)
    split = best_split(load, STREAMRL)
    assert (split.num_long_turns, split.long_tokens) == (100, 1000.0)
    assert split.turns_per_long_server < 2000 / 16


@pytest.mark.parametrize("recent", [[], [5.0]])
def test_nothing_known_isolates_nothing(recent: list[float]) -> None:
    """No turn has come yet, or all are equally long."""
    load = StepLoad(num_turns=100, num_servers=4, slots=8, recent=recent)
    assert best_split(load, STREAMRL) == TailSplit()
