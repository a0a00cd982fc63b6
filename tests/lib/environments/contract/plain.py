"""An environment that keeps the contract, and ones that break it on purpose."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, ClassVar

from seamflow.environment import EnvironmentFailed, Step, Task


class Plain:
    """Guess the number that the seed chose, in three answers."""

    max_episodes = 8
    is_seeded = True

    def reset(self, task: Task, seed: int) -> str:
        """The question."""
        self.number = random.Random(seed).randint(1, 9)
        self.num_answers = 0
        return f"Guess a number from 1 to 9. It is not {self.number % 9 + 1}."

    def step(self, message: Mapping[str, Any]) -> Step:
        """Higher or lower."""
        self.num_answers += 1
        text = message["content"].strip()
        if text not in list("123456789"):
            return Step(messages="Answer with a number.", truncated=self.num_answers == 3)
        if int(text) == self.number:
            return Step(rewards=1.0, done=True)
        answer = "higher" if int(text) < self.number else "lower"
        return Step(messages=answer, truncated=self.num_answers == 3)


class Unseeded(Plain):
    """Breaks: a reset is repeatable by seed."""

    _resets: ClassVar[Iterator[int]] = count()

    def reset(self, task: Task, seed: int) -> str:
        """With the number of the next seed each time."""
        return super().reset(task, seed + next(self._resets))


class DeafToSeeds(Plain):
    """Breaks: other seeds start other episodes."""

    def reset(self, task: Task, seed: int) -> str:
        """With one number for all."""
        return super().reset(task, 0)


class Mixed(Plain):
    """Breaks: episodes are kept apart."""

    shared: ClassVar[dict[str, int]] = {}

    def reset(self, task: Task, seed: int) -> str:
        """Its number is everybody's."""
        text = super().reset(task, seed)
        self.shared["number"] = self.number
        return text

    def step(self, message: Mapping[str, Any]) -> Step:
        """By the number of the last reset."""
        self.number = self.shared["number"]
        return super().step(message)


class Refuses(Plain):
    """Breaks: capacity is waited for."""

    num_open: ClassVar[int] = 0

    def reset(self, task: Task, seed: int) -> str:
        """Fail while another episode is open."""
        if Refuses.num_open:
            raise EnvironmentFailed("full")
        Refuses.num_open += 1
        return super().reset(task, seed)

    def close(self) -> None:
        """Count."""
        Refuses.num_open = 0


class Fragile(Plain):
    """Breaks: a bad action is the policy's fault."""

    def step(self, message: Mapping[str, Any]) -> Step:
        """Raise for what is no number."""
        int(message["content"])
        return super().step(message)


class Generous(Plain):
    """Breaks: a bad action earns nothing."""

    def step(self, message: Mapping[str, Any]) -> Step:
        """Pay for everything."""
        return Step(rewards=1.0, done=True)
