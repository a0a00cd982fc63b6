"""Results of MCP tools, as the tool loop and the MCP adapter show them to the policy."""

from __future__ import annotations

import atexit
import json
import os
import sys
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hypothesis import strategies
from seamflow.environment import Task
from seamflow.environment.mcp_connection import McpConnection

from adapters.mcp_tools.environment import McpToolsEnvironment
from services.tool_loop.config import McpServerConfig
from services.tool_loop.tool_loop import called, mcp_connection
from services.tool_loop.toolbox import ToolError
from tests.suites.field import event_loop
from tests.suites.field.kind import Kind

MODULE = "tests.suites.field.servers.mcp_server"
SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the server's tool answers, and what the policy is to read."""

    answer: dict[str, Any]
    right: str
    tool: str = "answer"
    is_error: bool = False
    adapter: str | None = field(default=None)
    """What the adapter shows, where that differs."""


async def check(result: Result) -> None:
    """Both show the right text, and their connections stay."""
    connection, environment = await _connection(), await _environment()
    before = connection._client
    try:
        text = await called(connection, result.tool, result.answer, SECONDS)
    except ToolError as error:
        text = f"Error: {error}"
    if result.is_error != text.startswith("Error: ") or result.right not in text:
        raise AssertionError(f"the tool loop shows {text!r}")
    if not result.is_error and text != result.right:
        raise AssertionError(f"the tool loop shows {text!r}")
    if connection._client is not before and before is not None:
        raise AssertionError("the connection was made anew")
    function = {"name": result.tool, "arguments": json.dumps(result.answer)}
    call = {"id": "c", "type": "function", "function": function}
    step = await environment.step({"role": "assistant", "content": "", "tool_calls": [call]})
    assert not isinstance(step.messages, str)
    shown = step.messages[0]["content"]
    right = result.right if result.adapter is None else result.adapter
    if right not in shown or (not result.is_error and shown != right):
        raise AssertionError(f"the adapter shows {shown!r}")


_kept: list[Any] = []


async def _connection() -> McpConnection:
    connection = _made()
    if connection not in _kept:
        await connection.tools()
        _kept.append(connection)
    return connection


@cache
def _made() -> McpConnection:
    config = McpServerConfig(command=f"{sys.executable} -m {MODULE}", env={"PYTHONPATH": _path()})
    connection = mcp_connection("field", config, SECONDS)
    atexit.register(lambda: event_loop.run(connection.close()))
    return connection


def _path() -> str:
    return os.pathsep.join(sys.path)


async def _environment() -> McpToolsEnvironment:
    environment = _made_environment()
    if environment not in _kept:
        await environment.reset(Task(task_id="t", payload={"question": "?"}), 0)
        _kept.append(environment)
    return environment


@cache
def _made_environment() -> McpToolsEnvironment:
    command = [sys.executable, "-m", MODULE]
    environment = McpToolsEnvironment(command=command, env={"PYTHONPATH": _path()})
    atexit.register(lambda: event_loop.run(environment.close()))
    return environment


def text(*texts: str) -> list[dict[str, Any]]:
    """Parts of text."""
    return [{"type": "text", "text": each} for each in texts]


DATA = {"items": [{"n": 1}], "name": "ü"}
IMAGE = {"type": "image", "data": "aGk=", "mimeType": "image/png"}
AUDIO = {"type": "audio", "data": "aGk=", "mimeType": "audio/wav"}
FILE = {"uri": "file:///a.txt", "mimeType": "text/plain", "text": "content of a"}
BLOB = {"uri": "file:///a.bin", "mimeType": "application/zip", "blob": "aGk="}
LINK = {"type": "resource_link", "name": "a.txt", "uri": "file:///a.txt"}

EXAMPLES = [
    Result(answer={"content": text("hello")}, right="hello"),
    Result(answer={"content": text("a", "b")}, right="a\nb"),
    Result(
        answer={"content": [], "structuredContent": DATA},
        right='{"items": [{"n": 1}], "name": "ü"}',
    ),
    Result(answer={"content": text(""), "structuredContent": {"x": 1}}, right='{"x": 1}'),
    Result(answer={"content": text("short"), "structuredContent": {"x": 1}}, right="short"),
    Result(answer={"content": [], "structuredContent": {}}, right="{}"),
    Result(answer={"content": []}, right=""),
    Result(answer={"content": [{"type": "resource", "resource": FILE}]}, right="content of a"),
    Result(
        answer={"content": [*text("see"), {"type": "resource", "resource": FILE}]},
        right="see\ncontent of a",
    ),
    Result(
        answer={"content": [{"type": "resource", "resource": BLOB}]},
        right="[resource: file:///a.bin, application/zip, not shown]",
    ),
    Result(answer={"content": [LINK]}, right="[resource link: a.txt, file:///a.txt]"),
    Result(answer={"content": [IMAGE]}, right="[image: image/png, not shown]"),
    Result(answer={"content": [AUDIO, *text("it")]}, right="[audio: audio/wav, not shown]\nit"),
    Result(
        answer={"content": [IMAGE], "structuredContent": {"x": 1}},
        right='[image: image/png, not shown]\n{"x": 1}',
    ),
    Result(answer={"content": text("no"), "isError": True}, right="no", is_error=True),
    Result(
        answer={"content": [], "structuredContent": {"x": 1}, "isError": True},
        right='{"x": 1}',
        is_error=True,
    ),
    Result(
        answer={"content": [], "structuredContent": {"x": 1, "reward": 1.0, "done": True}},
        right='{"x": 1, "reward": 1.0, "done": true}',
        adapter='{"x": 1}',
    ),
    Result(
        answer={"content": [], "structuredContent": {"x": "no"}},
        tool="strict",
        right="",
        is_error=True,
    ),
    *(
        Result(answer={"code": code, "message": f"no {code}"}, right=f"no {code}", is_error=True)
        for code in (-32603, -32000, -32001, -32002, -32602, -32601, -32600, -32700, 1, 500)
    ),
]

JSON = strategies.recursive(
    strategies.integers(-100, 100) | strategies.text(max_size=5) | strategies.booleans(),
    lambda inner: (
        strategies.lists(inner, max_size=2)
        | strategies.dictionaries(strategies.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)
OBJECTS = strategies.dictionaries(
    strategies.text(min_size=1, max_size=4).filter(lambda name: name not in ("text", "done")),
    JSON,
    min_size=1,
    max_size=3,
)
TEXTS = strategies.text(min_size=1, max_size=20)
GENERATED = strategies.one_of(
    OBJECTS.map(
        lambda data: Result(
            answer={"content": [], "structuredContent": data},
            right=json.dumps(data, ensure_ascii=False),
        )
    ),
    strategies.lists(TEXTS, min_size=1, max_size=3).map(
        lambda all_: Result(answer={"content": text(*all_)}, right="\n".join(all_))
    ),
    TEXTS.map(
        lambda content: Result(
            answer={"content": [{"type": "resource", "resource": {**FILE, "text": content}}]},
            right=content,
        )
    ),
    strategies.tuples(strategies.integers(-32800, 1000), TEXTS).map(
        lambda given: Result(
            answer={"code": given[0], "message": given[1]}, right=given[1], is_error=True
        )
    ),
)

KINDS = (Kind(name="tool results", check=check, examples=EXAMPLES, generated=GENERATED, short=15),)
