"""The agent: works on a task with calls of the model, and returns the reward."""

from collections.abc import Mapping

from seamflow import SamplingParams, Task
from seamflow.client import Rollout

MAX_NEW_TOKENS = 4


def reward(task: Task, answer: str) -> float:
    """1 if the answer is the one of the task, else 0."""
    return float(answer.strip() == task.payload["answer"])


class LastLetterAgent:
    """Asks for the last letter of a word. One object runs many rollouts concurrently."""

    async def run(self, task: Task, rollout: Rollout) -> Mapping[str, float]:
        """One turn; for more, add `turn.message` and the next message, and generate again."""
        messages = [{"role": "user", "content": task.payload["question"]}]
        turn = await rollout.generate(messages, SamplingParams(max_new_tokens=MAX_NEW_TOKENS))
        return {"reward": reward(task, turn.text)}
