"""The interface of agents: users implement `Agent`, which gets a `Task`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from seamflow.client.rollout_client import Rollout
from seamflow.client.turn import Task

__all__ = ["Agent", "Task"]


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
