"""The environment under test: slow, and stuck where a file says so.

It writes each episode that has reached its end to a ledger, before its reward leaves the process:
a reward without an entry is made up.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from seamflow.environment import Step, Task

NUM_STEPS = 3
REWARD = 0.625
"""Of every episode that has ended."""
SIGMA = 1.5
"""Of the logarithm of a slow step's seconds."""
_TIMES = Random(0)
"""Not the episode's seed: a replacement, which has the same seed, is not as slow again."""


class Worker:
    """Three steps, each of `step_seconds` on average; the last one has the reward."""

    is_seeded: ClassVar = True
    max_episodes: ClassVar = 64

    def __init__(self, folder: str, step_seconds: float, slow: bool = False) -> None:
        """Ledger and orders to hang are in `folder`; `slow`: lognormal with a heavy tail."""
        self._folder = Path(folder)
        self._mean = step_seconds
        self._slow = slow

    def reset(self, task: Task, seed: int) -> str:
        """Start."""
        self._task = task
        self._seed = seed
        self._left = NUM_STEPS
        return "work"

    def step(self, message: Mapping[str, Any]) -> Step:
        """Take time, hang if told to, and end in the third step."""
        if _is_told_to_hang(self._folder):
            time.sleep(3600)
        time.sleep(self._seconds())
        self._left -= 1
        if self._left:
            return Step(messages="on", rewards={})
        self._record()
        return Step(rewards=REWARD, done=True)

    def _seconds(self) -> float:
        if not self._slow:
            return self._mean
        return _TIMES.lognormvariate(math.log(self._mean) - SIGMA**2 / 2, SIGMA)

    def _record(self) -> None:
        line = json.dumps([self._task.task_id, self._seed]) + "\n"
        path = self._folder / "ledger.jsonl"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


def ended_episodes(folder: Path) -> set[tuple[str, int]]:
    """Task and seed of each episode that reached its end."""
    path = folder / "ledger.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {(task, seed) for task, seed in map(json.loads, lines)}


def order_hangs(folder: Path, index: int) -> None:
    """Let the next step, of any process, never return."""
    (folder / f"hang-{index}").touch()


def _is_told_to_hang(folder: Path) -> bool:
    for order in folder.glob("hang-*"):
        with suppress(FileNotFoundError):  # another episode was faster
            order.rename(folder / f"hung-{order.name}")
            return True
    return False
