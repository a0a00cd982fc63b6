"""RLHFuse's R_t and m, against brute force and a simulation of every single decode step."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from scheduler.policy.tail_migration import Engines, GangCosts, best_tail, num_kept, starts, tail_at
from services.lib.decode_latency import DecodeLatency

INSTANCES = 500
EIGHTH = 1 / 8
"""Times are multiples of it, so that no sum of them is rounded."""

Groups = list[list[int]]


def engines(draw: random.Random) -> Engines:
    """A few small instances."""
    step = draw.randint(1, 4) * EIGHTH
    table = {1: step, 2: step + draw.randint(0, 1) * EIGHTH, 6: step + draw.randint(2, 6) * EIGHTH}
    return Engines(
        num_instances=draw.randint(1, 4),
        latency=DecodeLatency.of(table),
        flat_factor=draw.choice([1.0, 1.5, 2.0]),
        slots=draw.randint(1, 8),
        prompt_tokens=draw.randint(0, 3),
        prefill_seconds=draw.randint(0, 2) * EIGHTH,
    )


def gang(draw: random.Random) -> GangCosts:
    """One that takes up to two instances."""
    return GangCosts(
        num_instances=draw.randint(0, 2),
        switch_seconds=draw.randint(0, 4) * EIGHTH,
        token_seconds=draw.randint(0, 8) * EIGHTH,
    )


def batch(draw: random.Random) -> Groups:
    """Groups of one to three rollouts."""
    return [
        [draw.choice([1, 2, 3, 3, 4, 20]) for _ in range(draw.randint(1, 3))]
        for _ in range(draw.randint(1, 6))
    ]


class Steps:
    """An instance that decodes step by step: the oracle."""

    def __init__(self, samples: list[tuple[int, int]]) -> None:
        self.queue = [[number, 0, length] for number, length in samples]
        self.batch: list[list[int]] = []
        self.clock = 0.0

    def step(self, model: Engines, until: float) -> dict[int, float] | None:
        """One step, if it ends by `until`; gives the ends of rollouts."""
        while self.queue and len(self.batch) < model.slots:
            self.batch.append(self.queue.pop(0))
        if not self.batch or self.clock + model.latency.seconds(len(self.batch)) > until:
            return None
        self.clock += model.latency.seconds(len(self.batch))
        for rollout in self.batch:
            rollout[1] += 1
        ended = {number: self.clock for number, done, length in self.batch if done == length}
        self.batch = [rollout for rollout in self.batch if rollout[0] not in ended]
        return ended

    def run(self, model: Engines, until: float = math.inf) -> dict[int, float]:
        """As many steps as there are."""
        ends: dict[int, float] = {}
        while (ended := self.step(model, until)) is not None:
            ends |= ended
        return ends

    @property
    def left(self) -> list[list[int]]:
        """Rollouts that have not ended, those nearest to their end first."""
        return sorted(self.batch, key=lambda r: (r[2] - r[1], -r[1], r[0])) + self.queue


def started(groups: Groups, model: Engines) -> list[Steps]:
    """All instances at time 0."""
    samples = list(enumerate(length for group in groups for length in group))
    return [Steps(samples[i :: model.num_instances]) for i in range(model.num_instances)]


def complete(groups: Groups, ends: dict[int, float]) -> list[float]:
    """When each group is."""
    numbers = iter(range(len(ends)))
    return [max(ends[next(numbers)] for _ in group) for group in groups]


def oracle(groups: Groups, model: Engines, work: GangCosts, start: int) -> float:
    """Seconds of a batch whose gang begins at `start` complete groups, step by step."""
    ends: dict[int, float] = {}
    for one in started(groups, model):
        ends |= one.run(model)
    moment = sorted(complete(groups, ends))[start - 1]
    if work.num_instances and start < len(groups):
        ends = moved(groups, model, work, moment)
    clock = moment + work.switch_seconds
    for ready, index in sorted((t, i) for i, t in enumerate(complete(groups, ends))):
        clock = max(clock, ready)
        for _ in range(sum(groups[index])):
            clock += work.token_seconds
    return clock


def moved(groups: Groups, model: Engines, work: GangCosts, moment: float) -> dict[int, float]:
    """Ends of rollouts when the gang's instances hand theirs over at `moment`."""
    instances = started(groups, model)
    ends = {n: t for one in instances for n, t in one.run(model, moment).items()}
    by_need = sorted(instances, key=lambda one: -len(one.left))
    stay = by_need[: model.num_instances - work.num_instances]
    leave = by_need[len(stay) :]
    for one in stay:
        one.clock = moment
    for rollout in [rollout for one in leave for rollout in one.left]:
        target = min(stay, key=lambda one: len(one.left))
        if rollout[1]:
            target.clock += (model.prompt_tokens + rollout[1]) * model.prefill_seconds
        target.queue.append(rollout)
    return ends | {n: t for one in stay for n, t in one.run(model).items()}


def brute_kept(remaining: int, model: Engines) -> int:
    """The fewest instances, one after the other, that keep batches flat and fit the cache."""
    flat = max(
        size
        for size in range(1, 7)
        if model.latency.seconds(size) <= model.flat_factor * model.latency.seconds(1)
    )
    kept = 0
    while kept * flat < remaining or kept * model.slots < remaining:
        kept += 1
    return min(kept, model.num_instances)


def test_threshold_and_instances_are_the_brute_force_optimum() -> None:
    """R_t, m and the predicted time, on random batches, by an independent simulation."""
    draw = random.Random(4)
    early = 0
    for _ in range(INSTANCES):
        model, work, groups = engines(draw), gang(draw), batch(draw)
        tried = {max(len(groups) * share // 100, 1) for share in range(5, 105, 5)}
        if work.num_instances >= model.num_instances:
            tried = {len(groups)}  # none would be left to generate
        outcomes = {start: oracle(groups, model, work, start) for start in tried}
        found = best_tail([groups], model, work)
        assert found.seconds == min(outcomes.values())
        latest = max(start for start in tried if outcomes[start] == found.seconds)
        start = latest if work.num_instances else 1
        assert found == tail_at(groups, model, work, start)
        if found.remaining:
            early += 1
            most = model.num_instances - work.num_instances
            assert found.num_kept == min(brute_kept(found.remaining, model), most)
    assert early > INSTANCES / 10


def test_every_start_is_simulated_exactly() -> None:
    """Not only the best one."""
    draw = random.Random(5)
    for _ in range(300):
        model, work, groups = engines(draw), gang(draw), batch(draw)
        if work.num_instances < model.num_instances:
            for start in range(1, len(groups) + 1):
                expected = oracle(groups, model, work, start)
                assert tail_at(groups, model, work, start).seconds == expected


def test_num_kept_is_the_fewest_that_suffice() -> None:
    """m = max(⌈R_t / BS_max⌉, ⌈R_t * M / C⌉), by counting up."""
    draw = random.Random(6)
    for _ in range(INSTANCES):
        model = engines(draw)
        remaining = draw.randint(0, 40)
        assert num_kept(remaining, model) == brute_kept(remaining, model)


def long_tail(num_groups: int, scale: float = 1.0) -> Groups:
    """Lengths of RLHFuse's kind: the 99.9th percentile above ten times the median."""
    draw = random.Random(7)
    return [
        [1 + int(scale * min(2048, draw.lognormvariate(math.log(150), 0.85))) for _ in range(4)]
        for _ in range(num_groups)
    ]


LONG_TAIL = Engines(
    num_instances=8,
    latency=DecodeLatency.of({1: 0.02, 32: 0.024, 128: 0.06}),
    slots=64,
    prefill_seconds=1e-4,
)
HALF = GangCosts(num_instances=6, switch_seconds=0.5, token_seconds=1e-4)


def test_a_long_tail_migrates_inside_the_batch() -> None:
    """The shape of RLHFuse's figure: an optimum inside, worse on both of its sides."""
    groups = long_tail(128)
    found = best_tail([groups], LONG_TAIL, HALF)
    assert 0.05 < found.remaining / 512 < 0.6
    by_start = {start: tail_at(groups, LONG_TAIL, HALF, start).seconds for start in starts(128)}
    assert by_start[128] > 1.1 * found.seconds
    assert by_start[6] > 1.1 * found.seconds


def test_the_threshold_is_the_best_for_all_given_batches_together() -> None:
    """And it is counted in the last of them."""
    batches = [long_tail(32), long_tail(32, 0.1), long_tail(32, 3.0)]
    found = best_tail(batches, LONG_TAIL, HALF)

    def total(start: int) -> float:
        return sum(tail_at(groups, LONG_TAIL, HALF, start).seconds for groups in batches)

    best = max(starts(32), key=lambda start: (-total(start), start))
    assert found.remaining == tail_at(batches[-1], LONG_TAIL, HALF, best).remaining
    assert found.seconds == pytest.approx(total(best) / 3)


def test_a_gang_with_nodes_of_its_own_begins_at_once() -> None:
    """Nothing migrates for it, and so waiting gains nothing."""
    found = best_tail(
        [long_tail(32)],
        LONG_TAIL,
        GangCosts(num_instances=0, switch_seconds=0.0, token_seconds=1e-2),
    )
    assert found.remaining == 4 * 31


def test_nothing_moves_where_moving_costs_more_than_it_frees() -> None:
    """A prefill as slow as decoding, and hardly any work to begin early."""
    model = Engines(
        num_instances=4,
        latency=DecodeLatency.of({1: 0.01, 64: 0.02}),
        slots=64,
        prefill_seconds=1.0,
    )
    work = GangCosts(num_instances=2, switch_seconds=0.0, token_seconds=1e-6)
    groups = [[100] * 4, [100] * 4, [300] * 4]
    assert best_tail([groups], model, work).remaining == 0
    free = replace(model, prefill_seconds=0.0)
    slow = replace(work, token_seconds=1e-3)
    assert best_tail([groups], free, slow).remaining > 0, "control: without the cost it moves"


VALID: dict[str, Any] = {"num_instances": 2, "latency": DecodeLatency.of({1: 0.01}), "slots": 10}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_instances": 0}, "num_instances is 0"),
        ({"slots": 0}, "slots is 0"),
        ({"prefill_seconds": math.nan}, "prefill_seconds is nan"),
        ({"prompt_tokens": -1.0}, "prompt_tokens is -1.0"),
        ({"flat_factor": 0.5}, "factor is 0.5"),
    ],
)
def test_invalid_engines_are_rejected(fields: dict[str, Any], message: str) -> None:
    """Each message names the field and the value."""
    with pytest.raises(ValueError, match=message):
        Engines(**VALID | fields)


@pytest.mark.parametrize(
    ("groups", "start"), [([], 1), ([[]], 1), ([[0]], 1), ([[1]], 0), ([[1]], 2)]
)
def test_an_invalid_batch_is_rejected(groups: Groups, start: int) -> None:
    """No groups, no rollouts, no tokens, or a start beyond the batch."""
    with pytest.raises(ValueError, match=r"each group must hold|start is"):
        tail_at(groups, Engines(**VALID), HALF, start)
