"""The quickstart's agent, whose episodes begin as much later as a file says, on average."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping
from pathlib import Path

from seamflow.agent import Task
from seamflow.client import Rollout

from examples.quickstart.agent import ElevatorAgent

PACE_FILE = "SEAMFLOW_TEST_PACE_FILE"
"""Environment variable with the file's path; the file has seconds."""


class PacedAgent(ElevatorAgent):
    """Waits before it begins, each time for another time: episodes do not end all at once."""

    async def run(self, task: Task, rollout: Rollout) -> Mapping[str, float]:
        """As the quickstart's."""
        pace = await asyncio.to_thread(Path(os.environ[PACE_FILE]).read_text)
        await asyncio.sleep(float(pace) * random.uniform(0.2, 1.8))
        return await super().run(task, rollout)
