"""Settings of evaluation, shared by [evaluation] of a launcher's file and by [evaluator]."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from services.chassis.config.settings import ServerConfig


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
