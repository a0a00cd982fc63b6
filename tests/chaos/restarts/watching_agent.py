"""The quickstart's agent, which writes down every error that the SDK lets it see."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from seamflow.agent import Task
from seamflow.client import Rollout
from seamflow.errors import SeamflowError

from examples.quickstart.agent import ElevatorAgent

ERRORS_FILE = "WATCHING_AGENT_ERRORS"
"""Environment variable with the name of the file."""


class WatchingAgent:
    """Works as usual."""

    def __init__(self) -> None:
        self._agent = ElevatorAgent()
        self._file = Path(os.environ[ERRORS_FILE])

    async def run(self, task: Task, rollout: Rollout) -> Mapping[str, float]:
        """One task; an error is written down and raised again."""
        try:
            return await self._agent.run(task, rollout)
        except SeamflowError as error:
            with self._file.open("a") as out:
                out.write(f"{type(error).__name__} {rollout.rollout_id}: {error!r}\n")
            raise
