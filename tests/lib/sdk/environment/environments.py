"""Small environments and reward functions of the tests."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from seamflow.common.v1 import tokens_pb2
from seamflow.environment import CapacityReached, Endpoint, EnvironmentFailed, Step, Task

ADD = {"name": "add", "description": "adds", "parameters": {"type": "object"}}


class Guess:
    """Guess the number that the seed chose; tells its name of the episode back."""

    tools: ClassVar = [ADD]
    tasks: ClassVar = [{"highest": 9}, {"highest": 99}, {"highest": 999}]
    max_episodes = 4
    is_seeded = True

    def reset(self, task: Task, seed: int) -> str:
        """The question."""
        self.number = random.Random(seed).randint(1, task.payload["highest"])
        self.guesses: list[str] = []
        return f"Guess a number from 1 to {task.payload['highest']}."

    def step(self, message: Mapping[str, Any]) -> Step:
        """Higher or lower."""
        text = message["content"]
        self.guesses.append(text)
        if text == "give up":
            return Step(done=True, policy_failure="gave up")
        if int(text) == self.number:
            return Step(rewards={"reward": 1.0, "speed": 1 / len(self.guesses)}, done=True)
        answer = "higher" if int(text) < self.number else "lower"
        return Step(
            messages=answer,
            truncated=len(self.guesses) == 3,
            info={"guesses": self.guesses},
        )


class Greets:
    """Greets in words that its arguments choose."""

    def __init__(self, greeting: str, *, num_tasks: int = 1) -> None:
        self.tasks = [{"name": str(i)} for i in range(num_tasks)]
        self._greeting = greeting

    def reset(self, task: Task, seed: int) -> str:
        """The greeting."""
        return self._greeting

    def step(self, message: Mapping[str, Any]) -> Step:
        """Done."""
        return Step(done=True)


class AsyncEcho:
    """Answers each tool call, without threads."""

    closed: ClassVar[list[str]] = []

    async def reset(self, task: Task, seed: int) -> list[dict[str, str]]:
        """Two messages."""
        self.task = task
        system = {"role": "system", "content": "Echo."}
        return [system, {"role": "user", "content": task.task_id}]

    async def step(self, message: Mapping[str, Any]) -> Step:
        """The arguments of each call, under its id."""
        await asyncio.sleep(0)
        calls = message["tool_calls"]
        return Step(
            messages=[
                {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "content": call["function"]["arguments"],
                }
                for call in calls
            ],
            rewards=0.5,
        )

    async def close(self) -> None:
        """Remember it."""
        self.closed.append(self.task.task_id)


class Fails:
    """Fails as its task says."""

    def reset(self, task: Task, seed: int) -> Any:
        """What "reset" of the payload says."""
        self.task = task
        match task.payload.get("reset"):
            case "raise":
                raise RuntimeError("no disk")
            case "number":
                return 7
            case "nothing":
                return []
            case "roleless":
                return [{"content": "x"}]
        return "go"

    def step(self, message: Mapping[str, Any]) -> Any:
        """What "step" of the payload says."""
        match self.task.payload.get("step"):
            case "raise":
                raise RuntimeError("no disk")
            case "infrastructure":
                raise EnvironmentFailed("no host", tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE)
            case "nan":
                return Step(rewards=float("nan"), done=True)
            case "text":
                return "well"
            case "silent":
                return Step()
            case "stop":
                return next(iter(()))
        return Step(done=True)


class Blocks:
    """Blocks a step until it may go on."""

    may_go_on: ClassVar[threading.Event]

    def reset(self, task: Task, seed: int) -> str:
        """Start."""
        return "go"

    def step(self, message: Mapping[str, Any]) -> Step:
        """Wait, for "block"; else answer."""
        if message["content"] == "block":
            self.may_go_on.wait(30)
        return Step(done=True)


class FullAtFirst:
    """The first reset finds no place."""

    num_resets: ClassVar[int] = 0

    def reset(self, task: Task, seed: int) -> str:
        """No place, then one."""
        type(self).num_resets += 1
        if self.num_resets == 1:
            raise CapacityReached(retry_after=0.01)
        return "go"

    def step(self, message: Mapping[str, Any]) -> Step:
        """Done."""
        return Step(done=True)


class Drives:
    """A self-driving environment: its reward is the seed."""

    async def run(self, task: Task, endpoint: Endpoint, seed: int) -> dict[str, float]:
        """Check the endpoint."""
        if task.payload.get("fail"):
            raise RuntimeError("no policy")
        assert endpoint.credential == "secret"
        return {"reward": float(seed)}


def long_answer(task: Task, transcript: Sequence[Mapping[str, Any]]) -> float:
    """The length of the last message; tasks may make it fail."""
    if task.payload.get("fail"):
        raise RuntimeError("no judge")
    return float(len(transcript[-1]["content"]))


async def named(task: Task, transcript: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Two rewards."""
    return {"reward": 1.0, "style": 0.25}


NOT_AN_ENVIRONMENT = object()
