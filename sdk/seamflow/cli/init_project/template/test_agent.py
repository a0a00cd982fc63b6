"""Tests of the agent without a model: `python -m pytest test_agent.py`."""

import asyncio
from types import SimpleNamespace

from agent import LastLetterAgent
from seamflow import Task


class Says:
    """Stands in for a rollout: every turn of the policy is the same text."""

    def __init__(self, text):
        self.text = text

    async def generate(self, messages, sampling):
        message = {"role": "assistant", "content": self.text}
        return SimpleNamespace(text=self.text, message=message)


def rewards(text):
    """What the agent returns for the word `shed` when the policy says `text`."""
    task = Task(task_id="1", payload={"question": "shed", "answer": "d"})
    return asyncio.run(LastLetterAgent().run(task, Says(text)))


def test_the_last_letter_is_rewarded():
    assert rewards("d") == {"reward": 1.0}


def test_other_answers_are_not():
    assert rewards("s") == {"reward": 0.0}
    assert rewards("dd") == {"reward": 0.0}
    assert rewards("") == {"reward": 0.0}
