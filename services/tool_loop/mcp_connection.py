"""A connection to an MCP server, over HTTP or to a child process, made again when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_types import Tool as McpTool
from seamflow.channel import is_loopback
from seamflow.client.tool_results import result_text
from seamflow.common.v1 import tokens_pb2
from seamflow.environment import EnvironmentFailed

from services.tool_loop.config import McpServerConfig
from services.tool_loop.toolbox import Tool, ToolError

_ANSWERS_SECONDS = 5.0
_HTTP_SECONDS = 30.0
_MAX_PAGES = 100


class McpConnection:
    """A connection to one server. A call on a lost one fails; the next makes it anew."""

    def __init__(self, name: str, config: McpServerConfig, start_timeout: float) -> None:
        """`name` is that of the table; connecting takes at most `start_timeout` seconds."""
        self._name = name
        self._config = config
        self._start_timeout = start_timeout
        self._connecting = asyncio.Lock()
        self._owner: asyncio.Task[None] | None = None
        self._client: Client | None = None
        self._stop = asyncio.Event()

    async def tools(self) -> list[McpTool]:
        """The server's tools.

        Raises:
            EnvironmentFailed: INFRASTRUCTURE: it cannot be reached.
        """
        client = await self._connected()
        return await self._listed(client, self._start_timeout)

    async def call(self, tool: str, arguments: Mapping[str, Any], timeout: float) -> str:
        """The tool's answer as text.

        Raises:
            ToolError: the tool failed, by a result or an error of JSON-RPC, gave no answer within
                `timeout` seconds, or one that breaks its own schema.
            EnvironmentFailed: INFRASTRUCTURE: the server cannot be reached or is lost.
        """
        client = await self._connected()
        try:
            result = await self._answer(client.call_tool(tool, dict(arguments)), timeout)
        except EnvironmentFailed:
            raise
        except TimeoutError as error:
            await self._listed(client, _ANSWERS_SECONDS)
            raise ToolError(f"tool {tool} gave no answer within {timeout:g} s") from error
        except Exception as error:
            # A lost connection has codes that tools use too: a server that answers is not lost.
            await self._listed(client, _ANSWERS_SECONDS)
            raise ToolError(_why(error)) from error
        text = result_text(result)
        if result.is_error:
            raise ToolError(text or f"tool {tool} failed without a text")
        return text

    async def close(self) -> None:
        """End the connection, and the server if it is a child process."""
        self._stop.set()
        owner, client = self._owner, self._client
        self._owner = self._client = None
        if owner is not None:
            if client is not None:  # else it waits for a server that has not begun to answer
                await asyncio.wait([owner], timeout=_ANSWERS_SECONDS)
            owner.cancel()
            await asyncio.gather(owner, return_exceptions=True)

    async def _connected(self) -> Client:
        async with self._connecting:
            if self._client is None or self._owner is None or self._owner.done():
                await self.close()
                await self._connect()
        assert self._client is not None
        return self._client

    async def _connect(self) -> None:
        self._stop = asyncio.Event()
        ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        # The library binds a connection to the task that opened it, and cancels that task when the
        # connection is lost: it has a task of its own.
        self._owner = asyncio.create_task(self._own(ready, self._stop), name=f"mcp {self._name}")
        try:
            async with asyncio.timeout(self._start_timeout):
                waited: list[asyncio.Future[Any]] = [ready, self._owner]
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                self._client = ready.result() if ready.done() else await self._unconnected()
        except TimeoutError as error:
            await self.close()
            raise self._failed(f"no answer within {self._start_timeout:g} s") from error
        except EnvironmentFailed:
            await self.close()
            raise

    async def _unconnected(self) -> Client:
        assert self._owner is not None
        try:
            await self._owner
        except BaseException as error:
            raise self._failed(_why(error)) from error
        raise self._failed("it ended at once")

    async def _own(self, ready: asyncio.Future[Client], stop: asyncio.Event) -> None:
        async with _client(self._config) as client:
            if not ready.done():
                ready.set_result(client)
            await stop.wait()

    async def _answer(self, answer: Any, timeout: float) -> Any:
        """The result of a call, unless the connection is lost first.

        Raises:
            TimeoutError: neither came within `timeout` seconds.
        """
        assert self._owner is not None
        asking = asyncio.ensure_future(answer)
        try:
            done, _ = await asyncio.wait(
                [asking, self._owner], timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise TimeoutError
            if not asking.done():
                raise self._failed("the connection is lost")
            return await asking
        finally:
            asking.cancel()
            with suppress(BaseException):
                await asyncio.wait([asking])

    async def _listed(self, client: Client, seconds: float) -> list[McpTool]:
        """The tools; a server that does not list them is lost, and `EnvironmentFailed` says so."""
        try:
            found: list[McpTool] = await self._answer(_all_tools(client), seconds)
        except EnvironmentFailed:
            raise
        except Exception as error:
            await self._lost(client)
            why = f"no answer within {seconds:g} s"
            raise self._failed(why if isinstance(error, TimeoutError) else _why(error)) from error
        return found

    async def _lost(self, client: Client) -> None:
        async with self._connecting:
            if self._client is client:  # and not one that was made anew meanwhile
                await self.close()

    def _failed(self, why: str) -> EnvironmentFailed:
        config = self._config
        where = f"url = {config.url!r}" if config.url else f"command = {config.command!r}"
        return EnvironmentFailed(
            f"[tool_loop.mcp_servers.{self._name}] {where}: {why}; check that this MCP server runs",
            tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE,
        )


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


async def _all_tools(client: Client) -> list[McpTool]:
    tools: list[McpTool] = []
    cursor = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor, cache_mode="bypass")
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return tools


def _why(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error.error.message if isinstance(error, MCPError) else str(error) or repr(error)


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
            call=lambda arguments: connection.call(each.name, arguments, timeout),
        )

    return [made(each) for each in found]
