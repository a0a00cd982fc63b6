"""The agent: works on a task with calls of the model, and returns the reward."""

from collections.abc import Mapping

from seamflow import SamplingParams, Task
from seamflow.client import Rollout

MAX_NEW_TOKENS = 16


def reward(task: Task, answer: str) -> float:
    """Share of the answer's characters that are the letter asked for, from 0 to 1."""
    return answer.count(task.payload["letter"]) / max(len(answer), 1)


class LetterAgent:
    """Asks for a text of one letter. One object runs many rollouts concurrently."""

    async def run(self, task: Task, rollout: Rollout) -> Mapping[str, float]:
        """One turn; for more, add `turn.message` and the next message, and generate again."""
        messages = [{"role": "user", "content": task.payload["letter"]}]
        turn = await rollout.generate(messages, SamplingParams(max_new_tokens=MAX_NEW_TOKENS))
        return {"reward": reward(task, turn.text)}
