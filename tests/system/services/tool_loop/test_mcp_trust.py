"""The operator alone says which MCP servers are called: no task, answer or server changes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from seamflow.environment import Task

from services.chassis.errors import ConfigError
from services.tool_loop.cli import build
from tests.lib.tool_loop.support import HERE, STDIO, calls, config, serving

METADATA = "http://169.254.169.254/latest/meta-data"


@dataclass(slots=True)
class Web:
    """An HTTP server that answers everything alike, and keeps what it was asked."""

    location: str = ""
    """Where it redirects to; empty: it has found nothing."""
    url: str = ""
    asked: list[str] = field(default_factory=list)
    """Heads of the requests."""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.asked.append(head)
        status = f"307 Moved\r\nLocation: {self.location}" if self.location else "404 Not Found"
        writer.write(
            f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        await writer.drain()
        writer.close()


@asynccontextmanager
async def web(location: str = "") -> AsyncIterator[Web]:
    """Serve in this process."""
    served = Web(location)
    server = await asyncio.start_server(served.answer, "127.0.0.1", 0)
    served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
    try:
        yield served
    finally:
        server.close()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    """A bearer token for the MCP server."""
    file = tmp_path / "token"
    file.write_text("secret-of-the-operator\n")
    return file


async def test_a_redirect_to_another_server_is_not_followed(token_file: Path) -> None:
    """Neither the call nor its credential goes there; the start is refused, and names the server.

    Negative control: a client that follows redirects does reach it.
    """
    async with web() as other, web(other.url) as server:
        settings = config(mcp_servers={"a": {"url": server.url, "token_file": token_file}})
        with pytest.raises(ConfigError, match=r"\[tool_loop.mcp_servers.a\] url = "):
            async with build(settings):
                pytest.fail("was started")
        assert "secret-of-the-operator" in server.asked[0]
        assert other.asked == []
        async with httpx2.AsyncClient(follow_redirects=True) as client:
            await client.post(server.url, json={})
        assert len(other.asked) == 1


@pytest.mark.parametrize("name", [METADATA, "http", "mcp_servers", "tests/add", "../add"])
async def test_what_the_policy_calls_is_a_name_of_a_listed_tool(name: str) -> None:
    """An address or a command as the name or an argument of a call is told as a mistake."""
    message = calls((name, {"url": METADATA, "command": "touch /tmp/x"}))
    async with (
        serving(tools=[f"{HERE}:search"]) as client,
        await client.reset(_task({})) as episode,
    ):
        step = await episode.step(message)
    assert f"there is no tool {name!r}" in str(step.messages)


async def test_a_task_names_no_server() -> None:
    """Fields of its payload fill the prompt and are given to rewards, whatever they are called."""
    async with web() as other:
        server = {"url": other.url, "command": f"touch {other.url}"}
        payload = {"mcp_servers": {"b": server}, "url": other.url, "tools": [other.url]}
        async with (
            serving(mcp_servers={"tests": {"command": STDIO}}) as client,
            await client.reset(_task(payload)) as episode,
        ):
            tools = {tool["function"]["name"] for tool in episode.observation.tools or ()}
            step = await episode.step(calls(("add", {"a": 1, "b": 2})))
        assert "3" in str(step.messages)
        assert {"add", "count"} <= tools
        assert other.asked == []


def _task(payload: dict[str, Any]) -> Task:
    return Task(task_id="t", payload={"question": METADATA, **payload})
