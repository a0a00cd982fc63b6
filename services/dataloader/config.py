"""Dataloader settings, table [dataloader]."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator

from services.chassis.config.settings import ServerConfig, Settings
from services.lib.tasks.task_rows import RowFields


class CurriculumConfig(Settings):
    """Repeated tasks that always fail or always succeed are submitted less often."""

    share: float = Field(1.0, gt=0, le=1)
    """Share of the epochs in which such a task is submitted; 1: all, so that there is no
    curriculum."""
    lowest: float = 0.0
    """Recent success rate up to which a task counts as hopeless."""
    highest: float = 1.0
    """Recent success rate from which on a task counts as solved."""
    min_rollouts: int = Field(4, ge=1)
    """Closed rollouts of a task before its rate is used."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.lowest < self.highest:
            raise ValueError(
                f"curriculum.lowest is {self.lowest}: give less than curriculum.highest, "
                f"{self.highest}"
            )
        return self


class DataloaderConfig(ServerConfig):
    """Settings of the dataloader."""

    trajectory_manager: str = "127.0.0.1:50051"
    """Address of the trajectory manager, which queues the tasks."""
    evaluator: str | None = None
    """Address of the evaluator, whose first evaluation is over before the first task is submitted;
    unset: there is none."""
    run_id: str
    """Training job the tasks are for."""
    tasks: str
    """A .jsonl or .parquet file, "package.module:function" (of seed and epoch, yields dicts), a
    Hugging Face dataset as "hf://NAME?split=train&config=main", or the tasks that an environment
    server lists, as "environment://host:port"."""
    environment_token: SecretStr | None = None
    """Bearer token of the environment server."""
    num_heldout: int = Field(0, ge=0)
    """Last tasks of an environment's list that are not submitted; for evaluation."""
    task_id_field: str = "task_id"
    """Field that names a task; "" names tasks by their position in the file, from 0, as a row
    without "task_id" is named where this is not set."""
    payload_field: str = "payload"
    """Field that holds what the agent gets, an object; "" gives it the whole row, as a row without
    "payload" does where this is not set."""
    payload: dict[str, str] = Field(default_factory=dict)
    """What the agent gets instead: its fields, each a template over the fields of the row, such as
    {question = "Solve: {problem}", answer = "{solution}"}. One field alone keeps its type, also one
    within another, as "{reward_model[ground_truth]}"; braces that name no field are written
    twice."""
    broken_rows: Literal["refuse", "skip"] = "refuse"
    """A row that is no task, or has the name of another: refuse ends before the first task, and
    names all such rows; skip leaves them out and counts them."""
    required_fields: tuple[str, ...] = ()
    """Fields that what the agent gets must have, and not as null: a row without is no task. The
    launcher adds those that prompt and rewards of [tool_loop] name."""
    purpose: Literal["train", "eval"] = "train"
    """Whether rollouts of the tasks are trained on or only scored."""
    num_samples: int = Field(0, ge=0)
    """Rollouts per task; 0: the run's group_size."""
    max_samples: int = Field(0, ge=0)
    """Above 0: a repeated task gets as many rollouts as one success probably takes, at most this
    many. Needs resume."""
    min_samples: int = 2
    """With max_samples: least rollouts per task."""
    success_reward: str = "success"
    """With max_samples or curriculum: name of the reward that measures success, from 0 to 1."""
    success_chance: float = 0.9
    """With max_samples: required probability that at least one rollout succeeds, in (0, 1)."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """Tasks that are submitted less often."""
    epochs: int | None = Field(None, ge=0)
    """Times all tasks are submitted; 0: without end. Unset: without end to train on them, once to
    score them."""
    shuffle: bool = False
    """Submit in an order that depends on seed and epoch alone; functions order their own tasks."""
    seed: int = Field(0, ge=0)
    """Seed of the order, and of a function's tasks."""
    state_file: Path | None = None
    """File that keeps the position; unset: it is not kept."""
    resume: bool = False
    """Continue from state_file, if it exists."""

    @property
    def row_fields(self) -> RowFields:
        """Which fields of a row name the task and hold what the agent gets."""
        return RowFields(
            task_id_field=self.task_id_field,
            payload_field=self.payload_field,
            payload=self.payload,
            broken_rows=self.broken_rows,
            required_fields=self.required_fields,
        )

    @property
    def num_epochs(self) -> int:
        """Times all tasks are submitted; 0: without end."""
        return int(self.purpose == "eval") if self.epochs is None else self.epochs

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_samples()
        if self.curriculum.share < 1 and self.purpose == "eval":
            raise ValueError(
                f"curriculum.share is {self.curriculum.share} and purpose is eval: leave it at 1, "
                "as tasks that are only scored are all needed"
            )
        if self.num_heldout and not self.tasks.startswith("environment://"):
            raise ValueError(
                f"num_heldout is {self.num_heldout} and tasks is {self.tasks!r}: only tasks that "
                "an environment lists can be split; remove the held-out ones from the tasks"
            )
        if self.resume and self.state_file is None:
            raise ValueError(
                "resume is set, state_file is not: set the file that holds the position"
            )
        return self

    def _check_samples(self) -> None:
        if not self.max_samples:
            return
        if not 1 <= self.min_samples <= self.max_samples:
            raise ValueError(
                f"min_samples is {self.min_samples}: give 1 to max_samples, {self.max_samples}"
            )
        if not 0 < self.success_chance < 1:
            raise ValueError(f"success_chance is {self.success_chance}: give one between 0 and 1")
        if self.purpose == "eval":
            raise ValueError(
                f"max_samples is {self.max_samples} and purpose is eval: use num_samples for tasks "
                "that are only scored"
            )
        if not self.resume:
            raise ValueError(
                f"max_samples is {self.max_samples} without resume: set resume and state_file, as "
                "a task that is submitted again must have the same size"
            )
