"""A tool agent on the openai SDK, in a process of its own, trained by its rewards.

    seamflow train --config examples/openai_agent.toml

starts it. To start it yourself, on any machine with this folder and the openai SDK 3:

    SEAMFLOW_HTTP_GATEWAY=http://127.0.0.1:8080 python -m examples.openai_agent
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from examples.http_rollouts import run_rollouts
from examples.quickstart.lift import RIDE, Lift

TOOLS: list[Any] = [{"type": "function", "function": RIDE}]
MAX_TURNS = 4


async def main() -> None:
    """Work on leased tasks until the run ends."""
    # Rollouts share its connections; each has its own address and key.
    async with AsyncOpenAI(api_key="of each rollout") as openai:

        async def agent(rollout: Mapping[str, Any]) -> dict[str, float]:
            policy = openai.with_options(
                base_url=rollout["base_url"], api_key=rollout["credential"]
            )
            return await ride(policy, Lift(rollout["task"]["payload"]))

        await run_rollouts(agent)


async def ride(policy: AsyncOpenAI, lift: Lift) -> dict[str, float]:
    """Let the model ride until it answers without a tool call; returns the rewards."""
    messages: list[Any] = [{"role": "user", "content": lift.call()}]
    for _ in range(MAX_TURNS):
        answer = await policy.chat.completions.create(
            model="policy",
            messages=messages,
            tools=TOOLS,
            max_completion_tokens=96,
        )
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            if call.type == "function":
                result = lift.ride(json.loads(call.function.arguments).get("floors"))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            break
    return lift.rewards()


if __name__ == "__main__":
    asyncio.run(main())
