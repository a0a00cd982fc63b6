"""A session with an MCP server, in a task of its own."""

from __future__ import annotations

import asyncio
from typing import Any

from mcp import Client
from seamflow.common.v1 import tokens_pb2
from seamflow.environment import EnvironmentFailed

from adapters.replies import UnreadableAction

_INFRASTRUCTURE = tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE
_TIMEOUT = tokens_pb2.FAILURE_CLASS_TIMEOUT
_CLOSE_SECONDS = 5.0


class Session:
    """Calls tools of one server. Its client must be opened and closed by the same task."""

    def __init__(self, server: Any, name: str, timeout: float) -> None:
        self._server = server
        self._name = name
        self._timeout = timeout
        self._closing = asyncio.Event()
        self._opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run())

    async def tools(self) -> list[Any]:
        """All tools of the server.

        Raises:
            EnvironmentFailed: it cannot be reached.
        """
        client, found, cursor = await self._client(), [], None
        try:
            while True:
                asked = client.list_tools(cursor=cursor, cache_mode="bypass")
                page = await self._answered(asked, "list of tools")
                found += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    return found
        except EnvironmentFailed:
            raise
        except Exception as error:
            message = f"{self._name}, list of tools: {error!r}"
            raise EnvironmentFailed(message, _INFRASTRUCTURE) from error

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """The result of a tool.

        Raises:
            UnreadableAction: the tool answers with an error of JSON-RPC, or breaks its own schema.
            EnvironmentFailed: the server cannot be reached, is late, or is broken.
        """
        client = await self._client()
        try:
            return await self._answered(client.call_tool(name, arguments), f"tool {name}")
        except EnvironmentFailed:
            raise
        except Exception as error:
            # A lost connection has codes that tools use too: a server that answers is not lost.
            await self.tools()
            raise UnreadableAction(f"The call failed: {error}.") from error

    async def close(self) -> None:
        """End the session, and a server that was started for it."""
        self._closing.set()
        await asyncio.wait([self._task], timeout=_CLOSE_SECONDS)
        self._task.cancel()  # it still waits for a server that does not answer
        await asyncio.gather(self._task, return_exceptions=True)

    async def _client(self) -> Client:
        try:
            async with asyncio.timeout(self._timeout):
                return await asyncio.shield(self._opened)
        except TimeoutError as error:
            message = f"{self._name} did not start within {self._timeout:g} s"
            raise EnvironmentFailed(message, _TIMEOUT) from error

    async def _answered(self, call: Any, what: str) -> Any:
        working = asyncio.ensure_future(call)
        await asyncio.wait(
            [working, self._task], timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED
        )
        if working.done():
            return working.result()
        working.cancel()
        if self._task.done():
            raise EnvironmentFailed(f"{self._name} ended during {what}", _INFRASTRUCTURE)
        raise EnvironmentFailed(f"{self._name}, {what}: over {self._timeout:g} s", _TIMEOUT)

    async def _run(self) -> None:
        try:
            async with Client(self._server) as client:
                self._opened.set_result(client)
                await self._closing.wait()
        except Exception as error:
            if not self._opened.done():
                message = f"{self._name}: {error!r}"
                self._opened.set_exception(EnvironmentFailed(message, _INFRASTRUCTURE))
