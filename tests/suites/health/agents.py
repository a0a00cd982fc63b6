"""Agents of the runs that cannot learn, and of those that can: the init project's, changed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import ClassVar

from seamflow import SamplingParams, Task
from seamflow.client import Rollout


class Letters:
    """One answer; its reward is the share of the letter that was asked for."""

    max_new_tokens: ClassVar[int] = 16

    async def run(self, task: Task, rollout: Rollout) -> Mapping[str, float]:
        """One turn."""
        letter = task.payload["letter"]
        messages = [{"role": "user", "content": letter}]
        sampling = SamplingParams(max_new_tokens=self.max_new_tokens)
        turn = await rollout.generate(messages, sampling)
        share = turn.text.count(letter) / max(len(turn.text), 1)
        return self.rewards(letter, share, len(turn.text) >= self.max_new_tokens)

    def rewards(self, letter: str, share: float, is_cut: bool) -> Mapping[str, float]:
        """What the answer earns."""
        return {"reward": share}


class NoReward(Letters):
    """Its reward function is broken."""

    def rewards(self, letter: str, share: float, is_cut: bool) -> Mapping[str, float]:
        """Always the same."""
        return {"reward": 0.0}


class RewardOfTask(Letters):
    """Its reward says how hard the task is."""

    def rewards(self, letter: str, share: float, is_cut: bool) -> Mapping[str, float]:
        """The same for all answers to a task."""
        return {"reward": float(ord(letter) % 5)}


class OnlyWhole(Letters):
    """Its answers need more tokens than it allows."""

    max_new_tokens = 2

    def rewards(self, letter: str, share: float, is_cut: bool) -> Mapping[str, float]:
        """Nothing for an answer that was cut off, something for an end."""
        return {"reward": 0.0 if is_cut else 1.0}


class Cut(Letters):
    """Every answer is cut off, as it has one token, and some are right."""

    max_new_tokens = 1

    def rewards(self, letter: str, share: float, is_cut: bool) -> Mapping[str, float]:
        """Anything, so that groups have differences."""
        return {"reward": random.random()}


class FourLetters(Letters):
    """Nearly every answer is cut off, as it should be."""

    max_new_tokens = 4


class NeverSolved(Letters):
    """Its reward pays for a part of the way, and no answer is right."""

    def rewards(self, letter: str, share: float, is_cut: bool) -> Mapping[str, float]:
        """Whatever the share is, success is 0."""
        return {"reward": share, "success": 0.0}


class CutNeverSolved(NeverSolved):
    """Its answers have a token, and are never right."""

    max_new_tokens = 1


class Broken(Letters):
    """Its reward function raises for most answers."""

    def rewards(self, letter: str, share: float, is_cut: bool) -> Mapping[str, float]:
        """Right for one in four."""
        if random.random() < 0.75:
            raise KeyError("letter")
        return {"reward": share}


class Opposite(Letters):
    """Trained on the opposite of what is evaluated."""

    def rewards(self, letter: str, share: float, is_cut: bool) -> Mapping[str, float]:
        """`letters` is the metric of the evaluation."""
        return {"reward": -share, "letters": share}
