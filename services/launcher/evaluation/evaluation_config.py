"""Settings of evaluation while training, table [evaluation]."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from services.chassis.config.settings import Settings

__all__ = ["EvaluationConfig"]


class EvaluationConfig(Settings):
    """Evaluation beside training and after it; off unless every_steps is given."""

    every_steps: int = Field(0, ge=0)
    """Optimizer steps between evaluations; the last step is evaluated too. 0: no evaluation."""
    tasks: str | None = None
    """JSONL of held-out tasks; unset: heldout_tasks of [launcher]."""
    samples: int = Field(1, ge=1, le=4096)
    """Rollouts of each task; pass@k is estimated for each power of two up to it, and for it."""
    metric: str = ""
    """Reward that is averaged; empty: success of [launcher]."""
    goal: Literal["max", "min"] = "max"
    """Whether a greater or a smaller mean is better."""
    success_above: float = 0.5
    """A rollout whose metric is above this counts as solved, for pass@k."""
    concurrency: int = Field(16, ge=1)
    """Rollouts of an evaluation in flight, beside those of training."""
    keep_best: bool = True
    """Keep the checkpoint of the best evaluated step, as checkpoints/best."""
    patience: int = Field(0, ge=0)
    """Evaluations in a row without a better mean after which training ends early; 0: never."""
    min_improvement: float = Field(0.0, ge=0)
    """A mean counts as better only if it is better by more than this."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.every_steps == 0 and self.patience:
            raise ValueError(
                f"patience is {self.patience}, but every_steps is 0, so that nothing is "
                "evaluated: give every_steps"
            )
        return self

    @property
    def is_on(self) -> bool:
        """Whether anything is evaluated beside training."""
        return self.every_steps > 0
