"""A line of evaluation.jsonl: one evaluation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path


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
    abandoned: str | None = None
    """Why it has no result."""
    goal: str = "max"
    """Whether a greater or a smaller mean is better."""


def read_evaluations(file: Path) -> list[EvaluationLine]:
    """The lines of a file, oldest first; none if there is none. A line cut off by a crash is left
    out."""
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


def best_of(lines: Sequence[EvaluationLine]) -> EvaluationLine | None:
    """The newest evaluation that was better than all before it."""
    return next((line for line in reversed(lines) if line.is_best), None)


def shown(line: EvaluationLine) -> str:
    """The result as one line for people."""
    margin = "" if line.interval is None else f" ± {(line.interval[1] - line.interval[0]) / 2:.2f}"
    passed = [f"pass@{k} {value:.2f}" for k, value in (line.pass_at or {}).items() if k != "1"]
    best = " (best so far)" if line.is_best else ""
    return ", ".join([f"step {line.step}: {line.metric} {line.mean:.2f}{margin}{best}", *passed])
