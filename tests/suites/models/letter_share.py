"""An environment of two turns whose reward differs between any two texts, so that all train."""

from __future__ import annotations

from seamflow import Task
from seamflow.client import Message
from seamflow.environment import Step

_TURNS = 2


class LetterShare:
    """Rewards the share of characters that are ASCII."""

    tasks = tuple({"number": number} for number in range(8))

    def reset(self, task: Task, seed: int) -> str:
        """Start an episode."""
        self.turns_left = _TURNS
        return f"Write letters. This is text number {task.payload['number']}."

    def step(self, message: Message) -> Step:
        """Reward a turn; the second is the last."""
        self.turns_left -= 1
        text = str(message["content"])
        share = sum(letter.isascii() for letter in text) / max(len(text), 1)
        return Step(messages="More.", rewards={"success": share}, done=not self.turns_left)
