"""RLHFuse's R_t and m, against brute force and a simulation of every single decode step."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from services.lib.decode_latency import DecodeLatency
from tools.planning.tail_migration import (
    Engines,
    best_migration,
    instances_kept,
    num_kept,
    simulated,
)

INSTANCES = 1000
EIGHTH = 1 / 8
"""Times are multiples of it, so that no sum of them is rounded."""


def engines(draw: random.Random) -> Engines:
    """A few small instances."""
    step = draw.randint(1, 4) * EIGHTH
    table = {1: step, 2: step + draw.randint(0, 1) * EIGHTH, 6: step + draw.randint(2, 6) * EIGHTH}
    return Engines(
        num_instances=draw.randint(1, 4),
        latency=DecodeLatency.of(table),
        flat_factor=draw.choice([1.0, 1.5, 2.0]),
        cache_bytes=draw.randint(12, 40),
        sequence_bytes=draw.randint(3, 12),
        prompt_tokens=draw.randint(0, 3),
        prefill_seconds=draw.randint(0, 2) * EIGHTH,
        switch_seconds=draw.randint(0, 4) * EIGHTH,
        score_seconds=draw.randint(0, 8) * EIGHTH,
    )


class Steps:
    """An instance that decodes step by step: the oracle."""

    def __init__(self, lengths: list[int]) -> None:
        self.queue = [[0, length] for length in lengths]
        self.batch: list[list[int]] = []
        self.clock = 0.0

    def step(self, model: Engines, until: float) -> list[float] | None:
        """One step, if it ends by `until`; gives the ends of samples."""
        while self.queue and len(self.batch) < model.cache_bytes // model.sequence_bytes:
            self.batch.append(self.queue.pop(0))
        if not self.batch or self.clock + model.latency.seconds(len(self.batch)) > until:
            return None
        self.clock += model.latency.seconds(len(self.batch))
        for sample in self.batch:
            sample[0] += 1
        ended = [sample for sample in self.batch if sample[0] == sample[1]]
        self.batch = [sample for sample in self.batch if sample[0] < sample[1]]
        return [self.clock] * len(ended)

    def run(self, model: Engines, until: float = math.inf) -> list[float]:
        """As many steps as there are."""
        ends: list[float] = []
        while (ended := self.step(model, until)) is not None:
            ends += ended
        return ends

    @property
    def left(self) -> list[list[int]]:
        """Samples that have not ended, those nearest to their end first."""
        return sorted(self.batch, key=lambda s: (s[1] - s[0], -s[0])) + self.queue


def started(lengths: list[int], model: Engines) -> list[Steps]:
    """All instances at time 0."""
    return [Steps(lengths[i :: model.num_instances]) for i in range(model.num_instances)]


def scored(ready: list[float], free: list[float], model: Engines) -> float:
    """The end of scoring, one sample at a time."""
    free = [moment + model.switch_seconds for moment in free]
    for moment in sorted(ready):
        free.sort()
        free[0] = max(free[0], moment) + model.score_seconds
        last = free[0]
    return last


def oracle(lengths: list[int], model: Engines, remaining: int) -> float:
    """Seconds of the batch when its tail moves at `remaining`, step by step."""
    ends = sorted(end for instance in started(lengths, model) for end in instance.run(model))
    kept = brute_kept(remaining, model)
    if remaining == 0 or kept >= model.num_instances:
        return scored([ends[-1]] * len(ends), [ends[-1]] * model.num_instances, model)
    moment = min(t for t in ends if sum(end > t for end in ends) <= remaining)
    instances = started(lengths, model)
    ready = [moment for one in instances for _ in one.run(model, moment)]
    by_need = sorted(instances, key=lambda one: -len(one.left))
    stay, leave = by_need[:kept], by_need[kept:]
    for one in stay:
        one.clock = moment
    for sample in [sample for one in leave for sample in one.left]:
        target = min(stay, key=lambda one: len(one.left))
        if sample[0]:
            target.clock += (model.prompt_tokens + sample[0]) * model.prefill_seconds
        target.queue.append(sample)
    ready += [end for one in stay for end in one.run(model)]
    return scored(ready, [moment] * len(leave) + [one.clock for one in stay], model)


def brute_kept(remaining: int, model: Engines) -> int:
    """The fewest instances, one after the other, that keep batches flat and fit the cache."""
    flat = max(
        batch
        for batch in range(1, 7)
        if model.latency.seconds(batch) <= model.flat_factor * model.latency.seconds(1)
    )
    kept = 0
    while kept * flat < remaining or kept * model.cache_bytes < remaining * model.sequence_bytes:
        kept += 1
    return min(kept, model.num_instances)


def test_threshold_and_instances_are_the_brute_force_optimum() -> None:
    """R_t, m and the predicted time, on 1,000 random batches, by an independent simulation."""
    draw = random.Random(4)
    moved = 0
    for _ in range(INSTANCES):
        model = engines(draw)
        lengths = [draw.choice([1, 2, 3, 3, 4, 20]) for _ in range(draw.randint(1, 12))]
        tried = {0} | {len(lengths) * share // 100 for share in range(5, 100, 5)}
        outcomes = {remaining: oracle(lengths, model, remaining) for remaining in tried}
        found = best_migration(lengths, model)
        assert found.seconds == min(outcomes.values())
        assert outcomes[found.remaining] == found.seconds
        if found.remaining:
            moved += 1
            assert found.num_kept == brute_kept(found.remaining, model) < model.num_instances
    assert moved > INSTANCES / 10


def test_every_threshold_is_simulated_exactly() -> None:
    """Not only the best one."""
    draw = random.Random(5)
    for _ in range(300):
        model = engines(draw)
        lengths = [draw.randint(1, 25) for _ in range(draw.randint(1, 10))]
        for remaining in range(len(lengths)):
            assert simulated(lengths, model, remaining).seconds == oracle(lengths, model, remaining)


def test_num_kept_is_the_fewest_that_suffice() -> None:
    """m = max(⌈R_t / BS_max⌉, ⌈R_t * M / C⌉), by counting up."""
    draw = random.Random(6)
    for _ in range(INSTANCES):
        model = engines(draw)
        remaining = draw.randint(0, 40)
        assert num_kept(remaining, model) == brute_kept(remaining, model)


def test_those_with_most_samples_left_stay() -> None:
    """They have least to receive; names break ties."""
    assert instances_kept({"a": 3, "b": 5, "c": 5, "d": 1}, 2) == ("b", "c")
    assert instances_kept({"a": 3, "b": 5}, 0) == ()


def long_tail(num_samples: int) -> list[int]:
    """Lengths of RLHFuse's kind: the 99.9th percentile above ten times the median."""
    draw = random.Random(7)
    return [
        min(2048, 1 + int(draw.lognormvariate(math.log(150), 0.85))) for _ in range(num_samples)
    ]


def test_a_long_tail_moves_at_about_a_fifth_of_the_batch() -> None:
    """The shape of RLHFuse's figure: an optimum inside, near 20 %, worse on both of its sides."""
    lengths = long_tail(512)
    model = Engines(
        num_instances=8,
        latency=DecodeLatency.of({1: 0.02, 32: 0.024, 128: 0.06}),
        cache_bytes=64,
        sequence_bytes=1,
        prefill_seconds=1e-4,
        switch_seconds=0.5,
        score_seconds=0.25,
    )
    found = best_migration(lengths, model)
    assert 0.05 < found.remaining / len(lengths) < 0.40
    by_share = {share: simulated(lengths, model, 512 * share // 100) for share in (0, 5, 20, 60)}
    assert by_share[0].seconds > by_share[5].seconds > by_share[20].seconds
    assert by_share[60].seconds > found.seconds
    assert by_share[0].seconds / found.seconds > 1.15


def test_nothing_moves_where_moving_costs_more_than_it_frees() -> None:
    """A prefill as slow as decoding, and hardly any scoring to begin early."""
    model = Engines(
        num_instances=4,
        latency=DecodeLatency.of({1: 0.01, 64: 0.02}),
        cache_bytes=64,
        sequence_bytes=1,
        prefill_seconds=1.0,
        score_seconds=0.001,
    )
    assert best_migration(long_tail(64), model).remaining == 0


VALID: dict[str, Any] = {
    "num_instances": 2,
    "latency": DecodeLatency.of({1: 0.01}),
    "cache_bytes": 10,
    "sequence_bytes": 1,
    "prefill_seconds": 0.0,
    "score_seconds": 1.0,
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_instances": 0}, "num_instances is 0"),
        ({"score_seconds": -1.0}, "score_seconds is -1.0"),
        ({"prefill_seconds": math.nan}, "prefill_seconds is nan"),
        ({"sequence_bytes": 11}, "an instance must hold at least one sample"),
        ({"flat_factor": 0.5}, "factor is 0.5"),
    ],
)
def test_invalid_engines_are_rejected(fields: dict[str, Any], message: str) -> None:
    """Each message names the field and the value."""
    with pytest.raises(ValueError, match=message):
        Engines(**VALID | fields)


@pytest.mark.parametrize(("lengths", "remaining"), [([], 0), ([0], 0), ([1], 1), ([1], -1)])
def test_an_invalid_batch_is_rejected(lengths: list[int], remaining: int) -> None:
    """No samples, no tokens, or a threshold beyond the batch."""
    with pytest.raises(ValueError, match=r"lengths must hold|remaining is"):
        simulated(lengths, Engines(**VALID), remaining)
