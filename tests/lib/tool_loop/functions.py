"""Tools and reward functions of the tests."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import math_verify  # type: ignore[import-untyped]
from seamflow.environment import Task

NOT_A_FUNCTION = 7


def search(query: str, limit: int = 3, *, order: Literal["new", "old"] = "new") -> list[str]:
    """Searches the archive.

    Args:
        query: what to look for.
        limit (int): most results.

    Returns:
        Titles.
    """
    return [f"{query} {i} {order}" for i in range(limit)]


async def later(text: str) -> str:
    """Gives the text back."""
    await asyncio.sleep(0)
    return text


def raises(text: str) -> str:
    """Raises."""
    raise KeyError(text)


def hangs() -> str:
    """Never answers in time."""
    time.sleep(20)
    return "late"


def long(number: int) -> str:
    """A long text."""
    return "x" * number


def by_position(*texts: str) -> str:
    """Cannot be called by name."""
    return "".join(texts)


def num_messages(task: Task, transcript: Sequence[Mapping[str, Any]]) -> float:
    """The length of the conversation."""
    return float(len(transcript))


async def several(task: Task, transcript: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Two rewards."""
    return {"reward": 1.0, "style": 0.5}


def breaks(task: Task, transcript: Sequence[Mapping[str, Any]]) -> float:
    """Raises."""
    raise RuntimeError("no judge")


def never(task: Task, transcript: Sequence[Mapping[str, Any]]) -> float:
    """Never returns in time."""
    time.sleep(20)
    return 0.0


def text(task: Task, transcript: Sequence[Mapping[str, Any]]) -> str:
    """No number."""
    return "1.0"


def nothing(task: Task, transcript: Sequence[Mapping[str, Any]]) -> float:
    """Not a number."""
    return float("nan")


def no_transcript(task: Task) -> float:
    """Lacks a parameter."""
    return 1.0


def alarmed(task: Task, transcript: Sequence[Mapping[str, Any]]) -> float:
    """Ends its own loop by an alarm."""

    def ring(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        while True:
            time.sleep(0.01)
    except TimeoutError:
        return 1.0


def compares(task: Task, transcript: Sequence[Mapping[str, Any]]) -> float:
    """By math-verify with its own limits."""
    gold, answer = task.payload["answer"], transcript[-1]["content"]
    return float(math_verify.verify(math_verify.parse(gold), math_verify.parse(answer)))


def _never(transcript: Sequence[Mapping[str, Any]]) -> bool:
    return bool(transcript[-1]["content"] == "never")


def busy(task: Task, transcript: Sequence[Mapping[str, Any]]) -> float:
    """Computes without an end, with a process beside it, if the answer is "never"."""
    if _never(transcript):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    while _never(transcript):
        pass
    return 1.0


def exits(task: Task, transcript: Sequence[Mapping[str, Any]]) -> float:
    """Ends the interpreter if the answer is "never"."""
    if _never(transcript):
        sys.exit(3)
    return 1.0


def dies(task: Task, transcript: Sequence[Mapping[str, Any]]) -> float:
    """Kills its process if the answer is "never"."""
    if _never(transcript):
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def later_reward(task: Task, transcript: Sequence[Mapping[str, Any]]) -> Any:
    """Returns what is to be awaited, without being a coroutine function."""
    return several(task, transcript)
