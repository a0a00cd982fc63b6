"""The evaluations of a run: evaluation.jsonl, the best one, and when to stop."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from services.launcher.evaluation import estimates
from services.launcher.evaluation.evaluation_config import EvaluationConfig

__all__ = ["EvaluationLine", "EvaluationLog", "evaluation_figures", "line_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationLine:
    """One evaluation; a line of evaluation.jsonl."""

    label: str
    """before, after, or step-N of the step that was due."""
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
    successes: dict[str, int] | None = None
    """Solved rollouts of each task."""
    is_best: bool = False
    """Whether it was the best evaluation so far."""
    checkpoint: str | None = None
    """Folder of the kept checkpoint of this step; None: it is not the best, or there was none."""
    seconds: float = 0.0
    """Duration."""
    abandoned: str | None = None
    """Why it has no result."""
    goal: str = "max"
    """Whether a greater or a smaller mean is better."""


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


def evaluation_figures(log: EvaluationLog | None) -> dict[str, object]:
    """Figures for the summary of a run."""
    lines = log.completed if log is not None else []
    best = log.best if log is not None else None
    return {
        "heldout_before": lines[0].mean if lines else None,
        "heldout_after": lines[-1].mean if lines else None,
        "heldout_tasks": lines[0].num_tasks if lines else 0,
        "evaluations": len(lines),
        "heldout_best": best.mean if best else None,
        "best_step": best.step if best else None,
        "best_checkpoint": best.checkpoint if best else None,
    }


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
