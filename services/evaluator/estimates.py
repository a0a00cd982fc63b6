"""Estimates from the rewards of an evaluation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence

_Z = statistics.NormalDist().inv_cdf(0.975)

Rewards = Mapping[str, Sequence[float]]
"""Rewards of the rollouts of each task; no task is without one."""


def mean(rewards: Rewards) -> float:
    """Mean over tasks of the mean reward of a task. Raises `ValueError` without tasks."""
    return statistics.fmean(_task_means(rewards))


def confidence_interval(rewards: Rewards) -> tuple[float, float] | None:
    """95 % confidence interval of `mean`, for tasks drawn at random; None for fewer than two tasks.

    The tasks are independent, the rollouts of a task are not. Rewards that are all 0 or 1: Wilson's
    interval, with as many independent rollouts as explain the spread of the task means. Others:
    Student's t over the task means.
    """
    means = _task_means(rewards)
    if len(means) < 2:
        return None
    error = statistics.stdev(means) / math.sqrt(len(means))
    if all(reward in (0, 1) for each in rewards.values() for reward in each):
        return _wilson(statistics.fmean(means), _num_independent(rewards, error))
    margin = _t_quantile(len(means) - 1) * error
    return statistics.fmean(means) - margin, statistics.fmean(means) + margin


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of `k` rollouts solves the task.

    1 - C(n-c, k) / C(n, k) for c solved of n rollouts. Raises `ValueError` for k above n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k is {k}: must be from 1 to the {num_samples} samples")
    return 1 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def passes(rewards: Rewards, above: float) -> dict[str, float]:
    """Mean pass@k over tasks, by k: the powers of two up to the fewest samples, and these."""
    fewest = min(map(len, rewards.values()))
    solved = [(len(each), sum(reward > above for reward in each)) for each in rewards.values()]
    return {
        str(k): statistics.fmean(pass_at_k(number, count, k) for number, count in solved)
        for k in sorted({2**i for i in range(fewest.bit_length())} | {fewest})
    }


def _task_means(rewards: Rewards) -> Collection[float]:
    if not rewards:
        raise ValueError("rewards is {}: an evaluation needs at least one task")
    return [statistics.fmean(each) for each in rewards.values()]


def _num_independent(rewards: Rewards, error: float) -> float:
    """Independent rollouts with this standard error: from one for each task to all rollouts."""
    rate = mean(rewards)
    num_tasks, num_rollouts = len(rewards), sum(map(len, rewards.values()))
    if error == 0:
        return num_tasks
    return min(max(rate * (1 - rate) / error**2, num_tasks), num_rollouts)


def _wilson(rate: float, number: float) -> tuple[float, float]:
    scale = 1 + _Z**2 / number
    centre = (rate + _Z**2 / (2 * number)) / scale
    margin = _Z / scale * math.sqrt(rate * (1 - rate) / number + _Z**2 / (4 * number**2))
    # Where all rewards are equal, a bound is the rate itself, but for rounding.
    return min(max(centre - margin, 0.0), rate), max(min(centre + margin, 1.0), rate)


def _t_quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t: exact for 1 and 2 degrees, else Cornish-Fisher's expansion.

    The error is below 0.04 (0.02 from 5 degrees of freedom on).
    """
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    first = (_Z**3 + _Z) / 4
    second = (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96
    third = (3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z) / 384
    return _Z + first / freedom + second / freedom**2 + third / freedom**3
