"""Tests of the agent without a model: `python -m pytest test_agent.py`."""

import asyncio
from types import SimpleNamespace

from agent import LetterAgent, reward
from seamflow import Task


class Says:
    """Stands in for a rollout: every turn of the policy is the same text."""

    def __init__(self, text):
        self.text = text

    async def generate(self, messages, sampling):
        message = {"role": "assistant", "content": self.text}
        return SimpleNamespace(text=self.text, message=message)


def rewards(text):
    """What the agent returns for the letter a when the policy says `text`."""
    task = Task(task_id="letter-a", payload={"letter": "a"})
    return asyncio.run(LetterAgent().run(task, Says(text)))


def test_the_reward_is_the_share_of_the_letter():
    assert rewards("aaaa") == {"reward": 1.0}
    assert rewards("abab") == {"reward": 0.5}
    assert rewards("zz") == {"reward": 0.0}


def test_an_empty_answer_earns_nothing():
    assert reward(Task(task_id="letter-a", payload={"letter": "a"}), "") == 0.0
