"""What the frameworks send: each request is recorded, and answered as the teacher says.

python -m tests.suites.agents.frameworks.recording
writes tests/lib/rollout/http_gateway/requests/*.json
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tests.lib.rollout.http_gateway.support import World
from tests.suites.agents.frameworks.installed import AGENTS, run_agent
from tests.suites.agents.frameworks.replay import FOLDER
from tests.suites.agents.frameworks.teacher import (
    DIALECTS,
    TeacherServer,
    answer_to,
    parsed,
    taught_world,
)


class Recorder:
    """A proxy in front of an HTTP gateway."""

    def __init__(self, found: World, server: TeacherServer) -> None:
        self.requests: list[dict[str, Any]] = []
        self._world = found
        self._server = server

    async def handle(self, request: web.Request) -> web.Response:
        """Record a request and forward it."""
        raw = await request.read()
        path = request.path[request.path.index("/v1/") :]
        entry: dict[str, Any] = {"path": path}
        if path in DIALECTS:
            body = json.loads(raw)
            self._server.said = answer_to(parsed(path, body))
            entry |= {"body": body, "said": self._server.said}
            self.requests.append(entry)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOPS}
        async with aiohttp.ClientSession(self._world.url, auto_decompress=False) as http:
            reply = await http.request(request.method, request.path, data=raw, headers=headers)
            data = await reply.read()
        if turn_id := reply.headers.get("seamflow-turn-id"):
            entry["turn_id"] = turn_id
        kept = {k: v for k, v in reply.headers.items() if k.lower() not in _HOPS}
        return web.Response(status=reply.status, body=data, headers=kept)


_HOPS = ("host", "content-length", "transfer-encoding", "connection", "accept-encoding")


async def recorded(name: str) -> list[dict[str, Any]]:
    """The requests of one framework's agent, in their order."""
    with tempfile.TemporaryDirectory() as folder:
        async with taught_world(Path(folder)) as (found, server):
            recorder = Recorder(found, server)
            app = web.Application(client_max_size=1 << 24)
            app.router.add_route("*", "/{path:.*}", recorder.handle)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            port = runner.addresses[0][1]
            base = f"http://127.0.0.1:{port}/rollouts/{found.rollout['rollout_id']}/v1"
            said = await asyncio.to_thread(run_agent, name, base, found.rollout["credential"])
            await runner.cleanup()
            turns = await found.recorded()
    print(name, said, [turn.prefix_length for turn in turns.values()], file=sys.stderr)
    return recorder.requests


def main(names: Sequence[str]) -> None:
    """Record the agents named, or all."""
    FOLDER.mkdir(exist_ok=True)
    for name in names or AGENTS:
        requests = asyncio.run(recorded(name))
        text = json.dumps(requests, indent=1, ensure_ascii=False)
        (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
