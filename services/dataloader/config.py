"""Configuration of the dataloader, table `[dataloader]`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.chassis.config import ServerConfig

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
        for name in ("num_samples", "epochs", "seed", "start_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 0")
        if self.resume and self.state_file is None:
            raise ValueError(
                "resume is set, state_file is not: set the file that holds the position"
            )
