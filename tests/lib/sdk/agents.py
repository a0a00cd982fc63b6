"""Agents that the runner's tests run, in this process and in others."""

from __future__ import annotations

import asyncio
import sys

from seamflow import Rollout, Task


class Answers:
    """One turn, then the reward of the task."""

    async def run(self, task: Task, rollout: Rollout) -> float:
        """Ask once."""
        await rollout.generate([{"role": "user", "content": "hi"}])
        return float(task.payload["reward"])


class Waits:
    """Runs until cancelled, and counts starts and cancellations."""

    def __init__(self) -> None:
        self.began: asyncio.Queue[str] = asyncio.Queue()
        self.cancelled: asyncio.Queue[str] = asyncio.Queue()

    async def run(self, task: Task, rollout: Rollout) -> float:
        """Wait."""
        await self.began.put(task.task_id)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.put_nowait(task.task_id)
            raise
        return 0.0


class Breaks:
    """Its environment fails."""

    async def run(self, task: Task, rollout: Rollout) -> float:
        """Fail."""
        raise RuntimeError("no browser")


class Exits:
    """Would end the process."""

    async def run(self, task: Task, rollout: Rollout) -> float:
        """Exit."""
        sys.exit(3)


class Echoes:
    """Returns whatever its task holds, number or not."""

    async def run(self, task: Task, rollout: Rollout) -> float:
        """Ask nothing."""
        reward: float = task.payload["reward"]
        return reward


class NotAsync:
    """Forgot `async`."""

    def run(self, task: Task, rollout: Rollout) -> float:
        """Not awaitable."""
        return 0.0
