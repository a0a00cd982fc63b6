"""Search for the weights of the dispatch rule whose schedule is shortest."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import product

from trainer.pipeline.fused_schedule.dispatch import Rule, dispatch
from trainer.pipeline.fused_schedule.problem import Orders, Problem, lower_bound

_POOL = 24
_SAMPLED = 6
_NEW_SHARE = 0.1
_CHANGED_SHARE = 0.35
_STEPS = (0.3, 0.3, 0.3, 0.2, 0.2, 0.2, 0.2, 1.0, 1.0)
"""Standard deviations of the changes, by weight."""
_UNLIMITED = 99.0

_Weights = tuple[float, ...]


def search(problem: Problem, cpu_seconds: float, seed: int = 0) -> tuple[Orders, float]:
    """The best schedule found, and its time; it ends early at the lower bound.

    Hill climbing in a pool of rules: of a few drawn ones the best is changed a little.

    Args:
        problem: what is scheduled.
        cpu_seconds: at least one rule is tried.
        seed: of the random numbers.
    """
    rng, bound, end = random.Random(seed), lower_bound(problem), time.process_time() + cpu_seconds
    fresh = _fresh(rng, problem)
    pool: list[tuple[float, int, _Weights]] = []
    best: tuple[Orders, float] | None = None
    tries = 0
    while best is None or (best[1] > bound and time.process_time() < end):
        tries += 1
        weights = next(fresh) if _is_new(rng, pool) else _changed(rng, pool)
        orders, seconds = dispatch(problem, _rule(weights))
        pool = sorted([*pool, (seconds, tries, weights)])[:_POOL]
        if best is None or seconds < best[1]:
            best = orders, seconds
    return best


def _is_new(rng: random.Random, pool: list[tuple[float, int, _Weights]]) -> bool:
    return len(pool) < _POOL or rng.random() < _NEW_SHARE


def _fresh(rng: random.Random, problem: Problem) -> Iterator[_Weights]:
    """Rules that are often good, then random ones."""
    first, other = problem.pipelines[0], problem.pipelines[-1]
    even = first.seconds_alone / other.seconds_alone
    for weight, backward, offset in product((1.0, even), (0.0, 1.0), (0.0, _UNLIMITED)):
        yield (weight, backward, backward, 0.0, 1.0, 1.0, 1.0, offset, offset)
    while True:
        backward_shares = (rng.uniform(-1, 1.5), rng.uniform(-1, 1.5))
        slopes = (rng.uniform(0.3, 1.6), rng.uniform(0.3, 1.6))
        offsets = (rng.choice((0, 0, 1, 2, _UNLIMITED)), rng.choice((0, 0, 1, 2, _UNLIMITED)))
        others = (rng.uniform(-1, 1), rng.uniform(0, 1.5))
        yield (rng.uniform(0.3, 3), *backward_shares, *others, *slopes, *offsets)


def _changed(rng: random.Random, pool: list[tuple[float, int, _Weights]]) -> _Weights:
    weights = min(rng.sample(pool, _SAMPLED))[2]
    return tuple(
        each + rng.gauss(0, step) if rng.random() < _CHANGED_SHARE else each
        for each, step in zip(weights, _STEPS, strict=True)
    )


def _rule(weights: _Weights) -> Rule:
    weight, first, others, share, behind, slope_0, slope_1, offset_0, offset_1 = weights
    return Rule(
        weight=weight,
        backward_shares=(first, others),
        share=share,
        behind=behind,
        window_slopes=(slope_0, slope_1),
        window_offsets=(offset_0, offset_1),
    )
