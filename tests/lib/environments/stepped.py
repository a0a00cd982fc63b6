"""Small environments of these tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any, ClassVar

from seamflow.environment import Endpoint, Step, Task

ADD = {"name": "add", "description": "adds", "parameters": {"type": "object"}}


class Counting:
    """Lasts `turns` steps of the payload, each with reward 1 and a second named one."""

    tools: ClassVar = [ADD]
    seeds: ClassVar[dict[str, list[int]]] = {}
    """Seeds of the episodes of each task."""

    def reset(self, task: Task, seed: int) -> str:
        """The question."""
        self.seeds.setdefault(task.task_id, []).append(seed)
        self.left = task.payload.get("turns", 2)
        return "count"

    def step(self, message: Mapping[str, Any]) -> Step:
        """One fewer."""
        self.left -= 1
        rewards = {"reward": 1.0, "length": float(len(message["content"]))}
        return Step(messages="more", rewards=rewards, done=self.left == 0)


class Fragile:
    """Fails the first episode of each task, as its payload says, and then lasts one step."""

    num_resets: ClassVar[dict[str, int]] = {}

    def reset(self, task: Task, seed: int) -> str:
        """Raise, for "reset"."""
        self.num_resets[task.task_id] = self.num_resets.get(task.task_id, 0) + 1
        self.how = task.payload["how"] if self.num_resets[task.task_id] == 1 else ""
        if self.how == "reset":
            raise RuntimeError("no disk")
        return "go"

    async def step(self, message: Mapping[str, Any]) -> Step:
        """Raise, hang, or give no number."""
        if self.how == "step":
            raise RuntimeError("no disk")
        if self.how == "hang":
            await asyncio.sleep(3600)
        if self.how == "nan":
            return Step(rewards=float("nan"), done=True)
        return Step(rewards=0.25, done=True)


class Crowd:
    """Counts how many episodes are open, and waits until as many as `wanted` are."""

    num_open: ClassVar[int] = 0
    most_open: ClassVar[int] = 0
    wanted: ClassVar[int] = 1

    async def reset(self, task: Task, seed: int) -> str:
        """Count."""
        Crowd.num_open += 1
        Crowd.most_open = max(Crowd.most_open, Crowd.num_open)
        return "go"

    async def step(self, message: Mapping[str, Any]) -> Step:
        """Wait for the others."""
        while Crowd.most_open < Crowd.wanted:
            await asyncio.sleep(0.01)
        return Step(rewards=1.0, done=True)

    async def close(self) -> None:
        """Count."""
        Crowd.num_open -= 1


class Stuck:
    """Hangs in a process whose variable STUCK is set."""

    def reset(self, task: Task, seed: int) -> str:
        """Start."""
        return "go"

    async def step(self, message: Mapping[str, Any]) -> Step:
        """Hang, or answer; says on stdout that it was asked."""
        print("step", flush=True)
        if os.environ.get("STUCK"):
            await asyncio.sleep(3600)
        return Step(rewards=0.25, done=True)


class Drives:
    """A self-driving environment without a policy."""

    endpoints: ClassVar[list[Endpoint]] = []

    async def run(self, task: Task, endpoint: Endpoint, seed: int) -> float:
        """Keep the endpoint."""
        self.endpoints.append(endpoint)
        return 0.75
