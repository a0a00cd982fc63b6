"""Runs an agent on leased tasks over HTTP, many at a time: lease, run, finish.

SEAMFLOW_HTTP_GATEWAY is the address that `seamflow train` and `seamflow serve` print, and
SEAMFLOW_AGENT_TOKEN the agents' token where the services have one. SSL_CERT_FILE names the
authority of a gateway with a certificate of its own.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote

import httpx2

__all__ = ["Agent", "run_rollouts"]

Agent = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, float]]]
"""Works on a rollout {"task", "base_url", "anthropic_base_url", "credential", …}; returns its
rewards."""

_GATEWAY = os.environ.get("SEAMFLOW_HTTP_GATEWAY", "http://127.0.0.1:8080")
_TOKEN = os.environ.get("SEAMFLOW_AGENT_TOKEN", "")
_DELAYS = (0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0)
_SECONDS_AFTER_A_FAILURE = 1.0


async def run_rollouts(agent: Agent, parallel: int = 48) -> None:
    """Run `agent` on up to `parallel` rollouts at once until the run ends."""
    async with httpx2.AsyncClient(base_url=_GATEWAY, timeout=60.0) as http:
        finished = await asyncio.gather(*(_work(http, agent) for _ in range(parallel)))
    print(f"the run has ended after {sum(finished)} rollouts of this agent")


async def _work(http: httpx2.AsyncClient, agent: Agent) -> int:
    """One rollout after the other; returns their number."""
    number = 0
    while True:
        # A repeated request with the same id leases nothing twice.
        request = {"wait_seconds": 20, "request_id": uuid.uuid4().hex}
        leased = (await _post(http, "/rollouts/lease", request, _TOKEN)).raise_for_status().json()
        if leased["empty_reason"] == "run_ended":
            return number
        for rollout in leased["rollouts"]:
            await _run(http, agent, rollout)
            number += 1


async def _run(http: httpx2.AsyncClient, agent: Agent, rollout: Mapping[str, Any]) -> None:
    try:
        end: dict[str, Any] = {"rewards": dict(await agent(rollout))}
    except Exception as error:  # the rollout is replaced by another one
        end = {"failure": {"class": "infrastructure", "message": str(error)[:1000]}}
        print(f"rollout {rollout['rollout_id']} failed: {error}")
        await asyncio.sleep(_SECONDS_AFTER_A_FAILURE)
    path = f"/rollouts/{quote(rollout['rollout_id'], safe='')}/finish"
    reply = await _post(http, path, end, rollout["credential"])
    if reply.is_error:  # such as 409: its lease was lost, or the run has ended
        print(f"rollout {rollout['rollout_id']} was not finished: {reply.text}")


async def _post(http: httpx2.AsyncClient, path: str, body: object, key: str) -> httpx2.Response:
    """One call of the HTTP gateway, repeated while it is busy, restarting or out of reach."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    for delay in _DELAYS:
        try:
            reply = await http.post(path, json=body, headers=headers)
            if reply.status_code != httpx2.codes.TOO_MANY_REQUESTS and not reply.is_server_error:
                return reply
        except httpx2.TransportError:
            pass
        await asyncio.sleep(delay)
    return await http.post(path, json=body, headers=headers)
