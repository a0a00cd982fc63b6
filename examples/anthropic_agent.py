"""The tool agent of openai_agent.py on the anthropic SDK.

    seamflow train --config examples/openai_agent.toml \\
        --agent-command "python -m examples.anthropic_agent"

starts it. To start it yourself, on any machine with this folder and the anthropic SDK 2:

    SEAMFLOW_HTTP_GATEWAY=http://127.0.0.1:8080 python -m examples.anthropic_agent
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from anthropic import AsyncAnthropic
from anthropic.types import ToolParam

from examples.http_rollouts import run_rollouts
from examples.quickstart.lift import RIDE, Lift

MAX_TURNS = 4
TOOL: ToolParam = {
    "name": RIDE["name"],
    "description": RIDE["description"],
    "input_schema": RIDE["parameters"],
}


async def main() -> None:
    """Work on leased tasks until the run ends."""
    # Rollouts share its connections; each has its own address and key.
    async with AsyncAnthropic(api_key="of each rollout") as anthropic:

        async def agent(rollout: Mapping[str, Any]) -> dict[str, float]:
            policy = anthropic.with_options(
                base_url=rollout["anthropic_base_url"], api_key=rollout["credential"]
            )
            return await ride(policy, Lift(rollout["task"]["payload"]))

        await run_rollouts(agent)


async def ride(policy: AsyncAnthropic, lift: Lift) -> dict[str, float]:
    """Let the model ride until it answers without a tool call; returns the rewards."""
    messages: list[Any] = [{"role": "user", "content": lift.call()}]
    for _ in range(MAX_TURNS):
        answer = await policy.messages.create(
            model="policy", messages=messages, tools=[TOOL], max_tokens=96
        )
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": lift.ride(dict(block.input).get("floors")),
            }
            for block in answer.content
            if block.type == "tool_use"
        ]
        if not results:
            break
        messages.append({"role": "user", "content": results})
    return lift.rewards()


if __name__ == "__main__":
    asyncio.run(main())
