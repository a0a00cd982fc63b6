"""An environment of two methods: the policy guesses a hidden number, and is told where it lies."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from seamflow import Task
from seamflow.client import Message
from seamflow.environment import Step

__all__ = ["GuessNumber"]

MAX_GUESSES = 4


class GuessNumber:
    """One episode. Equal task and seed hide the same number."""

    is_seeded = True
    tasks: tuple[Mapping[str, Any], ...] = tuple({"highest": 5 + index} for index in range(60))

    def reset(self, task: Task, seed: int) -> str:
        """Hide a number; the text is the first user message."""
        self.number = random.Random(seed).randint(1, task.payload["highest"])
        self.guesses_left = MAX_GUESSES
        return f"Guess a number from 1 to {task.payload['highest']}."

    def step(self, message: Message) -> Step:
        """Judge a guess: 1 for the number itself; the fourth wrong one ends the episode."""
        self.guesses_left -= 1
        found = re.search(r"\d+", str(message["content"]))
        guess = int(found[0]) if found else None
        if guess == self.number:
            return Step(rewards={"success": 1.0}, done=True)
        if not self.guesses_left:
            return Step(rewards={"success": 0.0}, done=True)
        hint = "It is a number." if guess is None else self._hint(guess)
        return Step(messages=hint, rewards={"success": 0.0})

    def _hint(self, guess: int) -> str:
        return "It is higher." if guess < self.number else "It is lower."
