"""Who gets how many servers: beside brute force, on many random instances."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from rollout.gateway.dispatch.tail_split import (
    LONG_SHARES,
    Load,
    Objective,
    Split,
    earliest_end,
    group_end,
    group_seconds,
    isolate_tail,
)
from services.lib.decode_latency import DecodeLatency

STREAMRL = DecodeLatency.of({1: 0.0085, 8: 0.0085, 32: 0.010, 64: 0.0115, 128: 0.015, 256: 0.021})


def instance(seed: int) -> tuple[Load, DecodeLatency]:
    """Turns, servers and a pace at random."""
    draw = random.Random(seed)
    step, table = 0.01, {}
    for batch in sorted(draw.sample(range(1, 300), draw.randint(1, 5))):
        step *= 1 + draw.random()
        table[batch] = step
    recent = sorted(draw.lognormvariate(6, 1) for _ in range(draw.randint(1, 60)))
    load = Load(
        num_turns=draw.randint(0, 400),
        num_servers=draw.randint(1, 24),
        slots=draw.randint(1, 64),
        recent=recent,
    )
    return load, DecodeLatency.of(table)


def least_at_or_above(share: float, numbers: Sequence[float]) -> float:
    """The least number that at least this share of all is not above."""
    return min(n for n in numbers if sum(m <= n for m in numbers) >= share * len(numbers))


def dealt(num_turns: int, num_servers: int) -> int:
    """Most turns on one server when they are dealt one by one."""
    hands = [0] * num_servers
    for turn in range(num_turns):
        hands[turn % num_servers] += 1
    return max(hands)


def waves(num_turns: int, slots: int) -> int:
    """Batches until none is left."""
    number = 0
    while num_turns > 0:
        num_turns, number = num_turns - slots, number + 1
    return number


def brute_force(load: Load, latency: DecodeLatency, objective: Objective) -> float:
    """The least cost over all splits, every turn dealt to a server."""
    num_long = int(0.2 * load.num_turns)
    lengths = [least_at_or_above(share, load.recent) for share in (0.9, 0.5)]
    costs = []
    for num_long_servers in range(1, load.num_servers):
        seconds = []
        servers = (num_long_servers, load.num_servers - num_long_servers)
        for turns, tokens, of in zip(
            (num_long, load.num_turns - num_long), lengths, servers, strict=True
        ):
            most = dealt(turns, of)
            pace = latency.seconds(min(most, load.slots))
            seconds.append(pace * tokens * waves(most, load.slots))
        costs.append(sum(seconds) if objective == "sum" else max(seconds))
    return min(costs)


@pytest.mark.parametrize("objective", ["sum", "max"])
def test_no_split_is_better_than_that_of_algorithm_2(objective: Objective) -> None:
    """On 1,500 instances the cost is that of brute force."""
    num_compared = 0
    for seed in range(1500):
        load, latency = instance(seed)
        split = isolate_tail(load, latency, objective)
        if load.num_servers < 2 or load.num_turns < 5:
            assert split == Split()
            continue
        num_compared += 1
        assert split.num_long_turns == int(0.2 * load.num_turns)
        assert split.long_tokens == least_at_or_above(0.8, load.recent)
        both = [
            group_seconds(turns, tokens, of, load.slots, latency)
            for turns, tokens, of in (
                (
                    split.num_long_turns,
                    least_at_or_above(0.9, load.recent),
                    split.num_long_servers,
                ),
                (
                    load.num_turns - split.num_long_turns,
                    least_at_or_above(0.5, load.recent),
                    load.num_servers - split.num_long_servers,
                ),
            )
        ]
        cost = sum(both) if objective == "sum" else max(both)
        assert cost == pytest.approx(brute_force(load, latency, objective))
    assert num_compared > 1000


def test_the_objectives_differ() -> None:
    """Control: were they one, the test above would compare the same thing twice."""
    splits = [
        tuple(isolate_tail(*instance(seed), objective) for objective in ("sum", "max"))
        for seed in range(200)
    ]
    assert any(by_sum != by_max for by_sum, by_max in splits)


def end_of(load: Load, latency: DecodeLatency, split: Split) -> float:
    """When the later group ends, with the lengths of each summed up one by one."""
    long = [tokens for tokens in load.recent if tokens > split.long_tokens]
    rest = [tokens for tokens in load.recent if tokens <= split.long_tokens]
    most = max(load.recent)
    ends = [
        group_end(
            load.num_turns - split.num_long_turns,
            rest,
            min(1.5 * split.long_tokens, most),
            load.num_servers - split.num_long_servers,
            load.slots,
            latency,
        ),
        group_end(split.num_long_turns, long, most, split.num_long_servers, load.slots, latency),
    ]
    return max(ends)


def test_no_tail_ends_the_step_earlier() -> None:
    """On 1,000 instances: over all shares and numbers of servers, and none at all."""
    for seed in range(1000):
        load, latency = instance(seed)
        options = [Split()]
        for share in LONG_SHARES:
            long_tokens = least_at_or_above(1 - share, load.recent)
            above = sum(tokens > long_tokens for tokens in load.recent) / len(load.recent)
            if num_long := math.floor(load.num_turns * above + 1e-9):
                options += [
                    Split(num_long_turns=num_long, num_long_servers=number, long_tokens=long_tokens)
                    for number in range(1, load.num_servers)
                ]
        best = min(end_of(load, latency, option) for option in options)
        assert end_of(load, latency, earliest_end(load, latency)) == pytest.approx(best)


def test_where_all_servers_are_full_for_long_nothing_is_isolated() -> None:
    """Throughput decides, not the longest turn."""
    recent = [float(tokens) for tokens in range(900, 1100)]
    load = Load(num_turns=100_000, num_servers=8, slots=64, recent=recent)
    assert earliest_end(load, STREAMRL) == Split()


def test_few_very_long_turns_get_servers_of_their_own() -> None:
    """Fewer turns on each of these than on the others."""
    recent = sorted([1000.0] * 190 + [20_000.0] * 10)
    load = Load(num_turns=2000, num_servers=16, slots=128, recent=recent)
    split = earliest_end(load, STREAMRL)
    assert (split.num_long_turns, split.long_tokens) == (100, 1000.0)
    assert split.turns_per_long_server < 2000 / 16


@pytest.mark.parametrize("recent", [[], [5.0]])
def test_nothing_known_isolates_nothing(recent: list[float]) -> None:
    """No turn has come yet, or all are equally long."""
    load = Load(num_turns=100, num_servers=4, slots=8, recent=recent)
    assert earliest_end(load, STREAMRL) == Split()
