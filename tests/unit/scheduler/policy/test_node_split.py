"""StreamRL's Alg. 1 and its dynamic adjustment, against brute force."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from scheduler.policy.node_split import (
    Split,
    StageProfile,
    adjusted,
    split_datacentres,
    split_nodes,
)

INSTANCES = 1000


def any_stage(draw: random.Random, num_nodes: int) -> Callable[[int], float]:
    """Seconds by node count that follow no law: ties, rises, and counts that cannot do it."""
    choices = [*(float(draw.randint(1, 12)) for _ in range(6)), math.inf]
    table = [draw.choice(choices) for _ in range(num_nodes)]
    table[draw.randrange(num_nodes)] = float(draw.randint(1, 12))
    return lambda nodes: table[nodes - 1]


def profiled_stage(draw: random.Random, num_nodes: int) -> Callable[[int], float]:
    """A stage as a profiler sees it."""
    counts = draw.sample(range(1, num_nodes + 1), draw.randint(1, min(4, num_nodes)))
    fixed, shared = draw.uniform(0, 5), draw.uniform(1, 100)
    return StageProfile.of({count: fixed + shared / count for count in counts}).seconds


def stage(draw: random.Random, num_nodes: int) -> Callable[[int], float]:
    """One or the other."""
    return draw.choice([any_stage, profiled_stage])(draw, num_nodes)


def test_one_datacentre_is_the_brute_force_optimum_on_fewest_nodes() -> None:
    """Every x + y <= n is tried, on profiles of any shape."""
    draw = random.Random(1)
    for _ in range(INSTANCES):
        nodes = draw.randint(2, 14)
        generation, training = stage(draw, nodes), stage(draw, nodes)
        every = [
            (max(generation(x), training(y)), x + y, x, y)
            for x in range(1, nodes)
            for y in range(1, nodes - x + 1)
        ]
        best = min(every)
        if math.isinf(best[0]):
            with pytest.raises(ValueError, match=f"num_nodes is {nodes}: too few"):
                split_nodes(generation, training, nodes)
            continue
        found = split_nodes(generation, training, nodes)
        assert (found.seconds, found.generation_nodes + found.training_nodes) == best[:2]
        assert found.generation_seconds == generation(found.generation_nodes)
        assert found.training_seconds == training(found.training_nodes)


def test_two_datacentres_are_the_brute_force_optimum() -> None:
    """The slower side keeps its size, the faster takes the closest k, the smallest of equals."""
    draw = random.Random(2)
    for _ in range(INSTANCES):
        m, n = draw.randint(1, 12), draw.randint(1, 12)
        generation, training = stage(draw, m), stage(draw, n)
        slow = max(generation(m), training(n))
        if math.isinf(slow):
            with pytest.raises(ValueError, match="_nodes is"):
                split_datacentres(generation, training, m, n)
            continue
        found = split_datacentres(generation, training, m, n)
        if generation(m) < training(n):
            closest = min((abs(generation(k) - slow), k) for k in range(1, m + 1))
            expected = (closest[1], n)
        else:
            closest = min((abs(training(k) - slow), k) for k in range(1, n + 1))
            expected = (m, closest[1])
        assert (found.generation_nodes, found.training_nodes) == expected


def test_the_brute_force_notices_a_split_that_takes_a_node_too_many() -> None:
    """Negative control: without running minima a profile that rises is split wrongly."""
    table = {1: 9.0, 2: 4.0, 3: 8.0}
    found = split_nodes(table.__getitem__, lambda nodes: 4.0, 4)
    assert (found.generation_nodes, found.training_nodes, found.seconds) == (2, 1, 4.0)
    greedy = min(range(1, 4), key=lambda x: abs(table[x] - 4.0 * (4 - x)))
    assert table[greedy] > found.seconds


def test_ten_thousand_nodes_are_asked_about_once_each() -> None:
    """Linear: a stage is a look-up, but there are many nodes."""
    request_batch = 0

    def counted(nodes: int) -> float:
        nonlocal request_batch
        request_batch += 1
        return 1e6 / nodes

    found = split_nodes(counted, counted, 10_000)
    assert (found.generation_nodes, found.training_nodes) == (5_000, 5_000)
    assert request_batch <= 2 * 10_000


def test_an_uneven_load_takes_the_uneven_split_that_streamrl_found_best() -> None:
    """40 generate and 24 train of 64, where generation is 5/3 of the work; 1.25 times even."""
    generation = StageProfile.of({8: 500.0, 64: 500.0 / 8})
    training = StageProfile.of({8: 300.0, 64: 300.0 / 8})
    found = split_nodes(generation.seconds, training.seconds, 64)
    assert (found.generation_nodes, found.training_nodes) == (40, 24)
    even = max(generation.seconds(32), training.seconds(32))
    assert even / found.seconds == pytest.approx(1.25)


def test_drifting_lengths_add_units_one_by_one_as_in_streamrl() -> None:
    """Answers grow from 10K to 20K: three units of 8, at gaps near 30, 21 and 15 s."""
    profile = StageProfile.of({8: 100.0, 256: 100.0 / 32}).seconds
    split = Split(
        generation_nodes=16, training_nodes=16, generation_seconds=60.0, training_seconds=60.0
    )
    gaps = []
    work = 16 * 60.0
    for _ in range(150):
        work *= 1.007
        seconds = work / split.generation_nodes
        measured = Split(
            generation_nodes=split.generation_nodes,
            training_nodes=16,
            generation_seconds=seconds,
            training_seconds=60.0,
        )
        split = adjusted(measured, generation=profile, training=profile, unit=8, num_nodes=56)
        if split != measured:
            gaps.append(seconds - 60.0)
            assert split.generation_seconds >= split.training_seconds
    assert split.generation_nodes == 40
    assert gaps == pytest.approx([30, 20, 15], abs=1.0)


def test_adjustment_follows_its_rule_on_random_splits() -> None:
    """δ >= δ' > 0 and free nodes: one unit for the slower stage; else nothing."""
    draw = random.Random(3)
    changed = 0
    for _ in range(INSTANCES):
        profiles = [profiled_stage(draw, 40) for _ in range(2)]
        counts = [draw.randint(1, 20) for _ in range(2)]
        seconds = [draw.uniform(1, 100) for _ in range(2)]
        unit, spare = draw.randint(1, 8), draw.randint(0, 8)
        before = split_of(counts, seconds)
        after = adjusted(
            before,
            generation=profiles[0],
            training=profiles[1],
            unit=unit,
            num_nodes=sum(counts) + spare,
        )
        slow = 0 if seconds[0] >= seconds[1] else 1
        now, then = profiles[slow](counts[slow]), profiles[slow](counts[slow] + unit)
        saved = seconds[slow] * (1 - then / now) if math.isfinite(now) else 0.0
        counts[slow] += unit if spare >= unit and 0 < saved <= abs(seconds[0] - seconds[1]) else 0
        assert (after.generation_nodes, after.training_nodes) == tuple(counts)
        changed += after != before
    assert 50 < changed < INSTANCES - 50


def split_of(counts: list[int], seconds: list[float]) -> Split:
    """Generation first."""
    return Split(
        generation_nodes=counts[0],
        training_nodes=counts[1],
        generation_seconds=seconds[0],
        training_seconds=seconds[1],
    )


@pytest.mark.parametrize("nodes", [-1, 0, 1])
def test_too_few_nodes_are_rejected(nodes: int) -> None:
    """Each stage needs one."""
    with pytest.raises(ValueError, match=f"num_nodes is {nodes}: give at least 2"):
        split_nodes(lambda _: 1.0, lambda _: 1.0, nodes)


def test_an_empty_datacentre_is_rejected() -> None:
    """Both must be able to do their stage."""
    with pytest.raises(ValueError, match="training_nodes is 0: give at least 1"):
        split_datacentres(lambda _: 1.0, lambda _: 1.0, 1, 0)
