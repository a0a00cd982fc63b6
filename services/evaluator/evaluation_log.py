"""The evaluations of a run: evaluation.jsonl, their estimates, the best one, and when to stop."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from services.lib.evaluation import (
    EvaluationConfig,
    EvaluationLine,
    best_of,
    read_evaluations,
)


class EvaluationLog:
    """The evaluations so far, appended to a file; those of an interrupted run count too."""

    def __init__(self, file: Path, config: EvaluationConfig) -> None:
        """Read the lines that `file` has already."""
        self._file, self._config = file, config
        self.lines = read_evaluations(file)

    @property
    def best(self) -> EvaluationLine | None:
        """The newest evaluation that was better than all before it."""
        return best_of(self.lines)

    @property
    def completed(self) -> list[EvaluationLine]:
        """Those with a result."""
        return [line for line in self.lines if line.mean is not None]

    @property
    def num_without_improvement(self) -> int:
        """Completed evaluations since the best one."""
        count = 0
        for line in reversed(self.lines):
            if line.is_best:
                break
            count += line.mean is not None
        return count

    @property
    def stop_reason(self) -> str | None:
        """Why training is to end early; None: it is not."""
        patience, target = self._config.stop_patience, self._config.stop_target
        best = self.best
        if best is None or best.mean is None:
            return None
        sign = 1 if self._config.goal == "max" else -1
        if target is not None and sign * best.mean >= sign * target:
            return (
                f"{best.metric} {best.mean:.3g} of step {best.step} reached the target {target:g}"
            )
        if 0 < patience <= self.num_without_improvement:
            return (
                f"{best.metric} is not better than the {best.mean:.3g} of step {best.step} after "
                f"{self.num_without_improvement} evaluations"
            )
        return None

    def is_better(self, mean: float) -> bool:
        """Whether `mean` is better than the best so far by more than min_improvement."""
        if not math.isfinite(mean):
            return False
        if self.best is None or self.best.mean is None:
            return True
        gain = mean - self.best.mean
        return (gain if self._config.goal == "max" else -gain) > self._config.min_improvement

    def add(self, line: EvaluationLine) -> None:
        """Append a line; one that a crash cut off before it is ended."""
        self.lines.append(line)
        is_cut = self._file.is_file() and self._file.read_bytes()[-1:] not in (b"", b"\n")
        with self._file.open("a", encoding="utf-8") as file:
            file.write(("\n" if is_cut else "") + json.dumps(asdict(line)) + "\n")


def line_of(rewards: Rewards, config: EvaluationConfig, **facts: object) -> EvaluationLine:
    """The line of an evaluation with these rewards of each task."""
    return EvaluationLine(
        num_tasks=len(rewards),
        num_rollouts=sum(map(len, rewards.values())),
        goal=config.goal,
        mean=mean(rewards),
        interval=confidence_interval(rewards),
        pass_at=passes(rewards, config.success_above),
        successes={
            name: sum(reward > config.success_above for reward in given)
            for name, given in rewards.items()
        },
        **facts,  # type: ignore[arg-type]
    )


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
