"""The MCP servers of the tool loop, over HTTP or in child processes, and their tools."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_types import Tool as McpTool
from seamflow.channel import is_loopback
from seamflow.environment.mcp_connection import McpCallError, McpConnection, result_text

from services.tool_loop.config import McpServerConfig
from services.tool_loop.toolbox import Tool, ToolError

_HTTP_SECONDS = 30.0


def mcp_connection(name: str, config: McpServerConfig, start_timeout: float) -> McpConnection:
    """A connection to the server of table `name`."""
    where = f"url = {config.url!r}" if config.url else f"command = {config.command!r}"
    where = f"[tool_loop.mcp_servers.{name}] {where}"
    return McpConnection(where, lambda: _client(config), start_timeout)


@asynccontextmanager
async def _client(config: McpServerConfig) -> AsyncIterator[Client]:
    if config.url is None:
        program, *arguments = config.arguments
        parameters = StdioServerParameters(command=program, args=arguments, env=config.env or None)
        async with Client(parameters) as client:
            yield client
        return
    headers = {}
    if config.token_file is not None:
        headers["authorization"] = f"Bearer {config.token_file.read_text(encoding='utf-8').strip()}"
    timeout = httpx2.Timeout(_HTTP_SECONDS, read=None)
    uses_proxies = not is_loopback(httpx2.URL(config.url).host)  # of the environment
    async with (
        httpx2.AsyncClient(headers=headers, timeout=timeout, trust_env=uses_proxies) as http,
        Client(streamable_http_client(config.url, http_client=http)) as client,
    ):
        yield client


def mcp_tools(
    name: str, connection: McpConnection, found: Iterable[McpTool], timeout: float
) -> list[Tool]:
    """The tools that the MCP server of table `name` listed, called over `connection`."""

    def made(each: McpTool) -> Tool:
        return Tool(
            name=each.name,
            description=each.description or "",
            parameters=each.input_schema,
            origin=f"[tool_loop.mcp_servers.{name}]",
            call=lambda arguments: called(connection, each.name, arguments, timeout),
        )

    return [made(each) for each in found]


async def called(
    connection: McpConnection, tool: str, arguments: Mapping[str, Any], timeout: float
) -> str:
    """The tool's answer as text.

    Raises:
        ToolError: the tool failed, by a result or an error of JSON-RPC, gave no answer within
            `timeout` seconds, or one that breaks its own schema.
        EnvironmentFailed: INFRASTRUCTURE: the server cannot be reached or is lost.
    """
    try:
        result = await connection.call(tool, arguments, timeout)
    except TimeoutError as error:
        raise ToolError(f"tool {tool} gave no answer within {timeout:g} s") from error
    except McpCallError as error:
        raise ToolError(str(error)) from error
    text = result_text(result)
    if result.is_error:
        raise ToolError(text or f"tool {tool} failed without a text")
    return text
