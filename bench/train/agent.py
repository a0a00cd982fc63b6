"""The agent of the throughput workloads: one call of the policy for each rollout."""

from __future__ import annotations

from collections.abc import Mapping

from seamflow.agent import Task
from seamflow.client import Rollout
from seamflow.common.v1.tokens_pb2 import SamplingParams

from bench.train.task import score, user_message


class SumAgent:
    """Asks once; the reward is that of the answer."""

    async def run(self, task: Task, rollout: Rollout) -> Mapping[str, float]:
        """Answer `task`; returns {"reward": 0..1, "success": 0 or 1}."""
        turn = await rollout.generate(
            messages=[{"role": "user", "content": user_message(task.payload)}],
            sampling=SamplingParams(max_new_tokens=task.payload["max_new_tokens"]),
        )
        reward, success = score(task.payload, turn.text)
        return {"reward": reward, "success": float(success)}
