"""The evaluations of a run: evaluation.jsonl, the best one, and when to stop."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

from services.evaluator import estimates
from services.lib.evaluation.evaluation_config import EvaluationConfig
from services.lib.evaluation.evaluation_line import EvaluationLine, best_of, read_evaluations


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


def line_of(
    rewards: estimates.Rewards, config: EvaluationConfig, **facts: object
) -> EvaluationLine:
    """The line of an evaluation with these rewards of each task."""
    return EvaluationLine(
        num_tasks=len(rewards),
        num_rollouts=sum(map(len, rewards.values())),
        goal=config.goal,
        mean=estimates.mean(rewards),
        interval=estimates.confidence_interval(rewards),
        pass_at=estimates.passes(rewards, config.success_above),
        successes={
            name: sum(reward > config.success_above for reward in given)
            for name, given in rewards.items()
        },
        **facts,  # type: ignore[arg-type]
    )
