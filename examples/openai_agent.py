"""A tool agent on the openai SDK: it leases tasks over HTTP and is trained by their rewards.

    seamflow train --config examples/openai_agent.toml

starts it. To start it yourself, on any machine with `pip install openai` and this folder:

    SEAMFLOW_HTTP_GATEWAY=http://127.0.0.1:8080 python -m examples.openai_agent
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx2
from openai import AsyncOpenAI, OpenAIError

from examples.quickstart.lift import RIDE, Lift

GATEWAY = os.environ.get("SEAMFLOW_HTTP_GATEWAY", "http://127.0.0.1:8080")
TOKEN = os.environ.get("SEAMFLOW_AGENT_TOKEN", "")
PARALLEL = 48
MAX_TURNS = 4


async def main() -> None:
    """Work on several rollouts at once until the run ends."""
    async with (
        httpx2.AsyncClient(base_url=GATEWAY, timeout=60.0) as http,
        AsyncOpenAI(api_key="each rollout has its own", base_url=GATEWAY) as openai,
        asyncio.TaskGroup() as workers,
    ):
        for _ in range(PARALLEL):
            workers.create_task(work(http, openai))


async def work(http: httpx2.AsyncClient, openai: AsyncOpenAI) -> None:
    """Lease one task after the other."""
    while True:
        # A repeated request with the same id leases nothing twice.
        request = {"wait_seconds": 20, "request_id": uuid.uuid4().hex}
        leased = (await post(http, "/rollouts/lease", request, TOKEN)).raise_for_status().json()
        if leased["empty_reason"] == "run_ended":
            return
        for rollout in leased["rollouts"]:
            await run(http, openai, rollout)


async def run(http: httpx2.AsyncClient, openai: AsyncOpenAI, rollout: Mapping[str, Any]) -> None:
    """Work on one task and tell how it ended."""
    key = rollout["credential"]
    policy = openai.with_options(base_url=rollout["base_url"], api_key=key)
    end: dict[str, Any]
    try:
        end = {"rewards": await ride(policy, Lift(rollout["task"]["payload"]))}
    except OpenAIError as error:
        end = {"failure": {"class": "infrastructure", "message": str(error)}}
    # An error here: the rollout has ended without us, such as by a lost lease. Go on with the next.
    await post(http, f"/rollouts/{quote(rollout['rollout_id'], safe='')}/finish", end, key)


async def ride(policy: AsyncOpenAI, lift: Lift) -> dict[str, float]:
    """Let the model ride until it answers without a tool call; returns the rewards."""
    messages: list[Any] = [{"role": "user", "content": lift.call()}]
    for _ in range(MAX_TURNS):
        answer = await policy.chat.completions.create(
            model="policy",
            messages=messages,
            tools=[{"type": "function", "function": RIDE}],  # type: ignore[list-item]
            max_completion_tokens=96,
        )
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            arguments = json.loads(call.function.arguments)  # type: ignore[union-attr]
            result = lift.ride(arguments.get("floors", ""))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            break
    return lift.rewards()


async def post(http: httpx2.AsyncClient, path: str, body: object, key: str) -> httpx2.Response:
    """One call of the HTTP gateway, repeated while it does not answer or is busy."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    for delay in (0.5, 1.0, 2.0, 4.0, 8.0):
        try:
            reply = await http.post(path, json=body, headers=headers)
            if reply.status_code != 429 and reply.status_code < 500:
                return reply
        except httpx2.TransportError:
            pass
        await asyncio.sleep(delay)
    return await http.post(path, json=body, headers=headers)


if __name__ == "__main__":
    asyncio.run(main())
