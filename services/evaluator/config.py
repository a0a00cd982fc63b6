"""Evaluator settings, table [evaluator]."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import Field, SecretStr, model_validator

from services.lib.evaluation import EvaluationConfig
from services.lib.tasks.task_rows import RowFields


class EvaluatorConfig(EvaluationConfig):
    """Settings of the evaluator: those of [evaluation], and where the other processes are."""

    run_id: str
    """Training job that is evaluated."""
    tasks: str
    """Held-out tasks, in each form that `tasks` of [dataloader] has; of an environment's list the
    last num_heldout."""
    metric: str = ""
    """Reward that is averaged; empty: "success", or where rollouts do not have it "reward", or the
    only one that they have."""
    num_heldout: int = Field(0, ge=0)
    """Last tasks of an environment's list, which the dataloader leaves out."""
    environment_token: SecretStr | None = None
    """Bearer token of the environment server."""
    seed: int = Field(0, ge=0)
    """Seed of a function's tasks."""
    trajectory_manager: str = "127.0.0.1:50051"
    """Address of the trajectory manager, which queues the tasks and has the rewards."""
    weights: str = "127.0.0.1:50055"
    """Address of the weights service, which tells the newest version."""
    scheduler: str = "127.0.0.1:50053"
    """Address of the scheduler, which names the rollout servers."""
    trainer: str | None = None
    """Address of the trainer; unset: as its node names it to the scheduler."""
    folder: Path
    """Folder of evaluation.jsonl and evaluation_samples.jsonl; a restarted evaluator goes on from
    them."""
    model: Path | None = None
    """Hugging Face folder whose tokenizer gives evaluation_samples.jsonl its text; unset: it has
    token ids."""
    concurrency_alone: int = Field(128, ge=1)
    """Rollouts in flight before and after training, while nothing is trained."""
    silence_seconds: float = Field(0.0, ge=0)
    """Time without a finished rollout before or after training after which the process ends, as no
    agent seems to work; 0: it waits."""
    trained_rewards: tuple[str, ...] = ()
    """Rewards that training uses, one of which a rollout must have; empty: "reward", or the only
    one that it has."""
    end_run: bool = True
    """End the run after the last evaluation: agents get no more tasks. Let the trainer's end_run be
    false, so that there are agents for it."""
    once_step: int | None = Field(None, ge=0)
    """Evaluate once, and wait for no training: the model that the rollout servers started with, as
    that of this optimizer step."""

    @property
    def row_fields(self) -> RowFields:
        """Which fields of a row name the task and hold what the agent gets."""
        names = RowFields.__dataclass_fields__
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        return RowFields(**{name: value for name, value in given.items() if value is not None})

    @model_validator(mode="after")
    def _check_tasks(self) -> Self:
        if self.tasks.startswith("environment://") != bool(self.num_heldout):
            raise ValueError(
                f"num_heldout is {self.num_heldout} and tasks is {self.tasks!r}: an environment's "
                "own list needs num_heldout, the number of its last tasks; others are all evaluated"
            )
        return self
