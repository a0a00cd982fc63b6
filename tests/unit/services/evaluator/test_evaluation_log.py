"""Estimates of evaluations against closed forms and simulation."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from services.evaluator import evaluation_log as estimates


def test_pass_at_k_is_the_share_of_choices_with_a_success() -> None:
    """Counted over all choices of k of n rollouts."""
    for num, solved, k in itertools.product(range(1, 7), range(7), range(1, 7)):
        if solved <= num and k <= num:
            outcomes = [index < solved for index in range(num)]
            chosen = list(itertools.combinations(outcomes, k))
            share = sum(map(any, chosen)) / len(chosen)
            assert estimates.pass_at_k(num, solved, k) == pytest.approx(share)
    with pytest.raises(ValueError, match="k is 3"):
        estimates.pass_at_k(2, 1, 3)


def test_passes_are_means_over_tasks() -> None:
    """For powers of two up to the samples, and these."""
    rewards = {"a": [1, 0, 0, 0, 0, 0], "b": [1, 1, 1, 1, 1, 1]}
    found = estimates.passes(rewards, above=0.5)
    assert list(found) == ["1", "2", "4", "6"]
    assert found["1"] == pytest.approx((1 / 6 + 1) / 2)
    assert found["6"] == 1.0


@pytest.mark.parametrize("is_binary", [True, False])
def test_the_interval_covers_the_truth(is_binary: bool) -> None:
    """In about 95 of 100 evaluations; half the interval, the negative control, in far fewer."""
    draw = random.Random(1)
    num_covered = num_half = 0
    for _ in range(400):
        rates = [draw.betavariate(2, 2) for _ in range(30)]
        rewards = {
            str(task): [
                float(draw.random() < rate) if is_binary else draw.gauss(rate, 0.3)
                for _ in range(4)
            ]
            for task, rate in enumerate(rates)
        }
        interval = estimates.confidence_interval(rewards)
        assert interval is not None
        low, high = interval
        centre, margin = (low + high) / 2, (high - low) / 4
        num_covered += low <= 0.5 <= high
        num_half += centre - margin <= 0.5 <= centre + margin
    assert 360 <= num_covered <= 398
    assert num_half < 320


def test_extreme_rewards_have_an_interval_of_their_own() -> None:
    """All solved does not mean certain; one task says nothing of other tasks."""
    low, high = estimates.confidence_interval({str(n): [1.0] for n in range(10)}) or (0, 0)
    assert 0.6 < low < 0.8
    assert high == 1.0
    assert estimates.confidence_interval({"a": [1.0, 0.0]}) is None
    assert estimates.mean({"a": [1.0, 0.0], "b": [1.0]}) == statistics.fmean([0.5, 1.0])


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_the_interval_holds_the_mean_also_where_all_rewards_are_equal(reward: float) -> None:
    """To the last bit: it is drawn as distances from the mean, which must not be negative."""
    for number in range(2, 300):
        rewards = {str(task): [reward] * (1 + task % 3) for task in range(number)}
        low, high = estimates.confidence_interval(rewards) or (1.0, 0.0)
        assert low <= estimates.mean(rewards) <= high
