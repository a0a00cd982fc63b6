"""The quickstart's agent through `base_url`: the openai SDK instead of seamflow's client.

    seamflow train --config examples/quickstart/multiplexed.toml --agent "" \\
        --agent-command "python -m examples.quickstart.http_agent"
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from examples.http_rollouts import run_rollouts
from examples.quickstart.task import score, user_message

__all__ = ["main"]


async def main() -> None:
    """Work on leased tasks until the run ends."""
    # Rollouts share its connections; each has its own address and key.
    async with AsyncOpenAI(api_key="of each rollout") as openai:

        async def agent(rollout: Mapping[str, Any]) -> dict[str, float]:
            policy = openai.with_options(
                base_url=rollout["base_url"], api_key=rollout["credential"]
            )
            return await drive(policy, rollout["task"]["payload"])

        await run_rollouts(agent, parallel=64)


async def drive(policy: AsyncOpenAI, task: Mapping[str, Any]) -> dict[str, float]:
    """Answer all calls of `task`; returns {"reward": 0..1, "success": 0 or 1}."""
    messages: list[Any] = []
    answers: list[str] = []
    for number in range(len(task["calls"])):
        messages.append({"role": "user", "content": user_message(task, number)})
        answer = await policy.chat.completions.create(
            model="policy", messages=messages, max_completion_tokens=96
        )
        messages.append(answer.choices[0].message)
        answers.append(answer.choices[0].message.content or "")
    reward, success = score(task, answers)
    return {"reward": reward, "success": float(success)}


if __name__ == "__main__":
    asyncio.run(main())
