"""A tool loop over real gRPC, and MCP servers in child processes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from seamflow.environment import EnvironmentClient, Task

from services.chassis.rpc.server import started
from services.tool_loop.cli import build
from services.tool_loop.config import ToolLoopConfig
from tests.lib.redis_server import free_port

HERE = "tests.lib.tool_loop.functions"
SERVER = Path(__file__).with_name("mcp_server.py")
STDIO = f"{sys.executable} {SERVER}"


def config(**settings: Any) -> ToolLoopConfig:
    """Settings of a test."""
    return ToolLoopConfig(admin_port=-1, drain_seconds=0.2, **settings)


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[EnvironmentClient]:
    """A client of a tool loop with these settings."""
    given = config(**settings)
    async with (
        build(given) as service,
        started(service, given, "tool_loop") as port,
        EnvironmentClient(f"127.0.0.1:{port}") as client,
    ):
        yield client


@contextmanager
def http_server(port: int | None = None) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """URL and process of an MCP server over HTTP, killed at the end."""
    port = port or free_port()
    command = [sys.executable, str(SERVER), str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{port}/mcp", process
        finally:
            process.kill()


async def listening(port: int) -> None:
    """Return when something accepts connections on the port."""
    async with asyncio.timeout(30):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            writer.close()
            return


def task(**payload: Any) -> Task:
    """A task of this payload."""
    return Task(task_id="t", payload={"question": "?", **payload})


def says(text: str) -> dict[str, Any]:
    """A message of the policy without a call."""
    return {"role": "assistant", "content": text}


def calls(*called: tuple[str, Any]) -> dict[str, Any]:
    """A message of the policy that calls tools; arguments that are no text become JSON."""
    made = [
        {
            "id": f"call{i}",
            "type": "function",
            "function": {
                "name": name,
                "arguments": given if isinstance(given, str) else json.dumps(given),
            },
        }
        for i, (name, given) in enumerate(called)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


async def answers(client: EnvironmentClient, *called: tuple[str, Any]) -> list[str]:
    """What the policy reads for these calls, in an episode of its own."""
    async with await client.reset(task()) as episode:
        step = await episode.step(calls(*called))
        assert not isinstance(step.messages, str)
        return [str(message["content"]) for message in step.messages]
