"""Evaluation: settings that [evaluation] and [evaluator] share, results, and pinned tasks."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2

from services.chassis.config.settings import ServerConfig
from services.chassis.errors import ConfigError
from services.lib.tasks.task_rows import TaskRow


class EvaluationConfig(ServerConfig):
    """Evaluation on held-out tasks before, beside and after training, in a run of the launcher."""

    every_steps: int = Field(0, ge=0)
    """Optimizer steps between evaluations; 0: only before and after training."""
    tasks: str | None = None
    """Held-out tasks, in each form that `tasks` of [launcher] has; unset: heldout_tasks of
    [launcher]. Without either there is no evaluation."""
    # A factory, as "" is a value of its own here, and not the absence of one.
    task_id_field: str | None = Field(default_factory=lambda: None)
    """Field that names a held-out task; unset: as task_id_field of [dataloader]."""
    payload_field: str | None = Field(default_factory=lambda: None)
    """Field that holds what the agent gets; unset: as payload_field of [dataloader]."""
    payload: dict[str, str] | None = None
    """Templates of what the agent gets; unset: as payload of [dataloader]. {}: none."""
    broken_rows: Literal["refuse", "skip"] | None = None
    """Whether held-out rows that are no tasks end the run before it begins, or are left out; unset:
    as broken_rows of [dataloader]."""
    required_fields: tuple[str, ...] | None = None
    """Fields that what the agent gets must have, and not as null; unset: as required_fields of
    [dataloader]."""
    samples: int = Field(1, ge=1, le=4096)
    """Rollouts of each task; pass@k is estimated for each power of two up to it, and for it."""
    metric: str = ""
    """Reward that is averaged; empty: success of [launcher]."""
    goal: Literal["max", "min"] = "max"
    """Whether a greater or a smaller mean is better."""
    success_above: float = 0.5
    """A rollout whose metric is above this counts as solved, for pass@k."""
    concurrency: int = Field(16, ge=1)
    """Rollouts of an evaluation beside training in flight; before and after it there is no limit
    but that of the agents."""
    timeout_seconds: float = Field(1800.0, gt=0)
    """Longest duration of an evaluation beside training; then it is given up, with a note."""
    shown_rollouts: int = Field(8, ge=0)
    """Rollouts of each evaluation, one of each task, that are written with their text and rewards
    to evaluation_samples.jsonl; 0 for none."""
    keep_best: bool = True
    """Keep the checkpoint of the best evaluated step, as checkpoints/best."""
    min_improvement: float = Field(0.0, ge=0)
    """A mean counts as better only if it is better by more than this."""
    stop_patience: int = Field(0, ge=0)
    """Evaluations in a row without a better mean after which training ends early; 0: never."""
    stop_target: float | None = None
    """Mean at which training ends early; unset: none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("stop_patience", "stop_target"):
            value = getattr(self, name)
            if not self.every_steps and value not in (0, None):
                raise ValueError(
                    f"{name} is {value}, but every_steps is 0, so that nothing is evaluated beside "
                    "training: give every_steps"
                )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationLine:
    """One evaluation; a line of evaluation.jsonl."""

    label: str
    """before, after, or step-N of the step that was due."""
    step: int
    weight_version: int
    """Version that all rollouts were pinned to."""
    metric: str
    """Reward that was averaged."""
    num_tasks: int
    num_rollouts: int
    mean: float | None
    interval: tuple[float, float] | None = None
    pass_at: dict[str, float] | None = None
    """Unbiased estimate of pass@k, by k."""
    successes: dict[str, int] | None = None
    is_best: bool = False
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


def pinned_task(task: TaskRow, label: str, version: int, samples: int) -> trajectory_pb2.Task:
    """The task in the evaluation `label`, whose rollouts sample with one version."""
    return trajectory_pb2.Task(
        task_id=f"{task.name}@{label}.v{version}",
        payload_json=task.payload_json,
        num_samples=samples,
        purpose=tokens_pb2.PURPOSE_EVAL,
        pinned_weight_version=version,
    )


def label_of(task_id: str) -> str:
    """The label of the evaluation that a `pinned_task` belongs to."""
    return task_id.rpartition("@")[2].partition(".")[0]


def check_trained_reward(trajectory: trajectory_pb2.Trajectory, wanted: Collection[str]) -> None:
    """Check that training would know what to use of a finished rollout's rewards.

    Raises:
        ConfigError: it would not; names the rollout, its rewards and the cure.
    """
    names = {reward.name for reward in trajectory.rewards.rewards}
    if not names or names & set(wanted or ("reward",)) or (not wanted and len(names) == 1):
        return
    shown = ", ".join(map(repr, sorted(names)))
    raise ConfigError(
        f"rollout {trajectory.rollout_id!r} has the rewards {shown}, and training would use "
        f"{', '.join(map(repr, wanted or ('reward',)))}: in [trainer.algorithm] set "
        f"reward = {sorted(names)[0]!r}, or reward_weights = {{{sorted(names)[0]} = 1.0}}"
    )


def shown_mean(value: float | None, metric: str) -> str:
    """A percentage where the metric counts successes; else a mean reward, as it is."""
    if value is None:
        return "–"
    return f"{value:.1%}" if metric == "success" or metric.startswith("pass@") else f"{value:.3f}"
