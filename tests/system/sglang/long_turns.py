"""An agent whose turns are long enough to be killed in the middle."""

from __future__ import annotations

from collections.abc import Mapping

from seamflow.agent import Task
from seamflow.client import Message, Rollout
from seamflow.common.v1.tokens_pb2 import SamplingParams

_TURNS = 2
_TOKENS = 192


class LongTurns:
    """Lets the policy talk past its stop token; the reward only has to differ within a group."""

    async def run(self, task: Task, rollout: Rollout) -> Mapping[str, float]:
        """Two turns, each of a fixed number of tokens."""
        messages: list[Message] = []
        sampling = SamplingParams(max_new_tokens=_TOKENS, ignore_eos=True)
        for number in range(_TURNS):
            messages.append({"role": "user", "content": f"at {number:02d} up to 09"})
            turn = await rollout.generate(messages, sampling)
            messages.append(turn.message)
        return {"reward": len(turn.text) % 7 / 7.0, "success": 0.0}
