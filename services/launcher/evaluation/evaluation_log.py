"""The evaluations of a run: evaluation.jsonl, the best one, and when to stop."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from services.launcher.evaluation import estimates
from services.launcher.evaluation.evaluation_config import EvaluationConfig

__all__ = ["EvaluationLine", "EvaluationLog", "line_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationLine:
    """One evaluation; a line of evaluation.jsonl."""

    step: int
    """Optimizer step that made the weights."""
    weight_version: int
    """Version that all rollouts were pinned to."""
    metric: str
    """Reward that was averaged."""
    num_tasks: int
    """Tasks."""
    num_rollouts: int
    """Finished rollouts."""
    mean: float | None
    """Mean of the metric over tasks; None: the evaluation was abandoned."""
    interval: tuple[float, float] | None = None
    """95 % confidence interval of the mean."""
    pass_at: dict[str, float] | None = None
    """Unbiased estimate of pass@k, by k."""
    other_version_tokens: int = 0
    """Sampled tokens of another version than the pinned one; 0, or the pin was not kept."""
    is_best: bool = False
    """Whether it was the best evaluation so far."""
    checkpoint: str | None = None
    """Folder of the kept checkpoint of this step; None: it is not the best, or there was none."""
    seconds: float = 0.0
    """Duration."""
    abandoned: str | None = None
    """Why it has no result."""


class EvaluationLog:
    """The evaluations so far, appended to a file; those of an interrupted run count too."""

    def __init__(self, file: Path, config: EvaluationConfig) -> None:
        """Read the lines that `file` has already."""
        self._file, self._config = file, config
        self.lines = _read(file)

    @property
    def best(self) -> EvaluationLine | None:
        """The newest evaluation that was better than all before it."""
        return next((line for line in reversed(self.lines) if line.is_best), None)

    @property
    def last_step(self) -> int:
        """Newest evaluated step; 0: none."""
        return max((line.step for line in self.lines), default=0)

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
    def is_stop_due(self) -> bool:
        """Whether training is to end early."""
        patience = self._config.patience
        return patience > 0 and self.num_without_improvement >= patience

    def is_better(self, mean: float) -> bool:
        """Whether `mean` is better than the best so far by more than min_improvement."""
        if not math.isfinite(mean):
            return False
        if self.best is None or self.best.mean is None:
            return True
        gain = mean - self.best.mean
        return (gain if self._config.goal == "max" else -gain) > self._config.min_improvement

    def add(self, line: EvaluationLine) -> None:
        """Append a line."""
        self.lines.append(line)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(line)) + "\n")


def line_of(
    rewards: estimates.Rewards, config: EvaluationConfig, **facts: object
) -> EvaluationLine:
    """The line of an evaluation with these rewards of each task."""
    return EvaluationLine(
        num_tasks=len(rewards),
        num_rollouts=sum(map(len, rewards.values())),
        mean=estimates.mean(rewards),
        interval=estimates.confidence_interval(rewards),
        pass_at=estimates.passes(rewards, config.success_above),
        **facts,  # type: ignore[arg-type]
    )


def _read(file: Path) -> list[EvaluationLine]:
    if not file.is_file():
        return []
    known = {field.name for field in fields(EvaluationLine)}
    lines = []
    for text in file.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(text)
        except json.JSONDecodeError:
            continue  # cut off by a crash
        lines.append(EvaluationLine(**{k: v for k, v in record.items() if k in known}))
    return lines
