"""A stand-in for the HTTP gateway: says the same for one credential, and remembers who asked."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from seamflow.environment import Endpoint


@dataclass(slots=True)
class Policy:
    """A policy by credential."""

    port: int = 0
    answers: dict[str, str] = field(default_factory=dict)
    """What it says, by credential."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Rollout and credential of each call."""

    def endpoint(self, rollout_id: str, answer: str) -> Endpoint:
        """Of a rollout whose policy says `answer`."""
        self.answers[f"key of {rollout_id}"] = answer
        url = f"http://127.0.0.1:{self.port}/rollouts/{rollout_id}"
        return Endpoint(
            base_url=f"{url}/v1",
            anthropic_base_url=url,
            rollout_gateway="",
            run_id="run",
            rollout_id=rollout_id,
            credential=f"key of {rollout_id}",
        )

    async def complete(self, request: web.Request) -> web.Response:
        """One chat completion."""
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        self.asked.append((request.match_info["rollout"], key))
        if key not in self.answers:
            return web.json_response({"error": {"message": "no such credential"}}, status=401)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self.answers[key]},
            "finish_reason": "stop",
        }
        body = {"id": "c", "object": "chat.completion", "created": 0, "model": "policy"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        assert json.loads(await request.text())["messages"]
        return web.json_response({**body, "choices": [choice], "usage": usage})


@asynccontextmanager
async def policy_server() -> AsyncIterator[Policy]:
    """Serve one."""
    policy = Policy()
    app = web.Application()
    app.router.add_post("/rollouts/{rollout}/v1/chat/completions", policy.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    policy.port = runner.addresses[0][1]
    try:
        yield policy
    finally:
        await runner.cleanup()
