"""StreamRL's Alg. 2 as printed, compared with brute force on random instances."""

from __future__ import annotations

import pytest

from bench.rollout.streamrl import Objective, group_seconds, split_as_printed
from rollout.gateway.dispatch.skew_aware import StepLoad, TailSplit
from services.lib.decode_latency import DecodeLatency
from tests.unit.rollout.gateway.dispatch.random_loads import instance, least_at_or_above


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


def brute_force(load: StepLoad, latency: DecodeLatency, objective: Objective) -> float:
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
        split = split_as_printed(load, latency, objective)
        if load.num_servers < 2 or load.num_turns < 5:
            assert split == TailSplit()
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
        tuple(split_as_printed(*instance(seed), objective) for objective in ("sum", "max"))
        for seed in range(200)
    ]
    assert any(by_sum != by_max for by_sum, by_max in splits)
