"""The interface of agents: users implement `Agent`, which gets a `Task`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from seamflow.client import Rollout

__all__ = ["Agent", "Task"]


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


class Agent(Protocol):
    """An agent: acts on a task with turns of the policy and returns the reward.

    One object runs many rollouts concurrently, so keep the state of a rollout in local variables.
    """

    async def run(self, task: Task, rollout: Rollout) -> Mapping[str, float] | float:
        """Work on `task`, calling `rollout.generate(...)` as often as needed.

        Returns the reward, or several named ones ("reward" is what the trainer trains on).
        An exception means that the environment failed: the sample is replaced, never scored 0.
        """
        ...
