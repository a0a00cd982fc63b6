"""What an agent works on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task as the dataloader submitted it.

    Example: Task(task_id="train-7@0", payload={"question": "2+2"})
    """

    task_id: str
    """Unique in the run; all rollouts of a group share it."""
    payload: Mapping[str, Any]
    """The fields of the task."""
    train: bool = True
    """Whether its rollouts are trained; False: an evaluation."""
