"""Configuration of the dataloader, table `[dataloader]`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.chassis.config.load import ServerConfig

__all__ = ["DataloaderConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataloaderConfig(ServerConfig):
    """What the dataloader can be told."""

    trajectory_manager: str = "127.0.0.1:50051"
    """Address of the trajectory manager, which queues the tasks."""
    run_id: str
    """Training job the tasks are for."""
    tasks: str
    """A .jsonl or .parquet file, or "package.module:function" (of seed and epoch, yields dicts)."""
    task_id_field: str = "task_id"
    """Field that names a task; "" names tasks by their position in the file."""
    payload_field: str = "payload"
    """Field that holds what the agent gets, an object; "" gives it the whole row."""
    purpose: Literal["train", "eval"] = "train"
    """Whether rollouts of the tasks are trained on or only scored."""
    num_samples: int = 0
    """Rollouts a task gets; 0 leaves it to the run."""
    max_samples: int = 0
    """Above 0: a task that was tried before gets as many as it probably takes for one to succeed,
    at most this many, so fewer where the policy does well. Needs resume."""
    min_samples: int = 2
    """Such a task gets at least this many."""
    success_reward: str = "success"
    """Reward that tells success, from 0 to 1, of a rollout for max_samples."""
    success_chance: float = 0.9
    """Wanted probability that one of the rollouts of such a task succeeds."""
    epochs: int = 1
    """Times all tasks are submitted; 0 goes on until the process is stopped."""
    shuffle: bool = False
    """Submit in an order that depends on seed and epoch alone; functions order their own tasks."""
    seed: int = 0
    """Seed of the order, and of a function's tasks."""
    state_file: Path | None = None
    """Where the position is kept; not set: nowhere."""
    resume: bool = False
    """Go on from state_file, if it exists, instead of beginning anew."""
    start_seconds: float = 60.0
    """Seconds the trajectory manager and the run may take to appear."""

    def __post_init__(self) -> None:
        for name in ("num_samples", "max_samples", "epochs", "seed", "start_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 0")
        self._check_samples()
        if self.resume and self.state_file is None:
            raise ValueError(
                "resume is set, state_file is not: set the file that holds the position"
            )

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
                f"max_samples is {self.max_samples} and purpose eval: tasks that are only scored "
                "have num_samples"
            )
        if not self.resume:
            raise ValueError(
                f"max_samples is {self.max_samples} without resume: set resume and state_file, as "
                "a task that is submitted again must have the same size"
            )
