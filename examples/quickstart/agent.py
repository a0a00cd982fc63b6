"""The quickstart's agent: answers each call of the lift's task with one turn of the policy."""

from __future__ import annotations

from collections.abc import Mapping

from seamflow.agent import Task
from seamflow.client import Message, Rollout
from seamflow.common.v1.tokens_pb2 import SamplingParams

from examples.quickstart.task import score, user_message

__all__ = ["ElevatorAgent"]


class ElevatorAgent:
    """Drives the lift from call to call and is paid for every floor in the right order."""

    async def run(self, task: Task, rollout: Rollout) -> Mapping[str, float]:
        """Answer all calls of `task`; returns {"reward": 0..1, "success": 0 or 1}."""
        messages: list[Message] = []
        answers: list[str] = []
        for number in range(len(task.payload["calls"])):
            messages.append({"role": "user", "content": user_message(task.payload, number)})
            turn = await rollout.generate(messages, SamplingParams(max_new_tokens=96))
            messages.append(turn.message)
            answers.append(turn.text)
        reward, success = score(task.payload, answers)
        return {"reward": reward, "success": float(success)}
