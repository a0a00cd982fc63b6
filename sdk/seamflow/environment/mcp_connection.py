"""A connection to an MCP server, and what the policy reads of a tool's result.

The package `mcp` is the caller's: a connection is given what opens its client.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

from seamflow.common.v1 import tokens_pb2
from seamflow.environment.environment import EnvironmentFailed

__all__ = ["McpCallError", "McpConnection", "result_text"]

_ANSWERS_SECONDS = 5.0
_MAX_PAGES = 100


class McpCallError(Exception):
    """The call of a tool gave an error of JSON-RPC, or a result that breaks the tool's schema."""


class McpConnection:
    """A connection to one server. A call on a lost one fails; the next makes it anew."""

    def __init__(
        self,
        where: str,
        client: Callable[[], AbstractAsyncContextManager[Any]],
        start_timeout: float,
        *,
        reconnects: bool = True,
    ) -> None:
        """Prepare it; the first call connects.

        Args:
            where: names the server in errors.
            client: opens a `Client` of the package `mcp`.
            start_timeout: seconds that connecting takes at most.
            reconnects: False: a lost connection stays lost, as the server knows an episode that
                no other one does.
        """
        self._where = where
        self._open_client = client
        self._start_timeout = start_timeout
        self._reconnects = reconnects
        self._connecting = asyncio.Lock()
        self._owner: asyncio.Task[None] | None = None
        self._client: Any = None
        self._stop = asyncio.Event()

    async def tools(self) -> list[Any]:
        """The server's tools, as `mcp` has them.

        Raises:
            EnvironmentFailed: INFRASTRUCTURE: it cannot be reached.
        """
        return await self._listed(await self._connected(), self._start_timeout)

    async def call(self, tool: str, arguments: Mapping[str, Any], timeout: float) -> Any:
        """The tool's `CallToolResult`.

        Raises:
            McpCallError: the tool gave an error of JSON-RPC, or a result that breaks its schema.
            TimeoutError: it gave no answer within `timeout` seconds; the server answers others.
            EnvironmentFailed: INFRASTRUCTURE: the server cannot be reached or is lost.
        """
        client = await self._connected()
        try:
            return await self._answer(client.call_tool(tool, dict(arguments)), timeout)
        except EnvironmentFailed:
            raise
        except Exception as error:
            # A lost connection has codes that tools use too: a server that answers is not lost.
            await self._listed(client, _ANSWERS_SECONDS)
            if isinstance(error, TimeoutError):
                raise
            raise McpCallError(_why(error)) from error

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

    async def _connected(self) -> Any:
        async with self._connecting:
            if self._client is None or self._owner is None or self._owner.done():
                was_connected = self._owner is not None or self._stop.is_set()
                if was_connected and not self._reconnects:
                    raise self._failed("the connection is lost")
                await self.close()
                await self._connect()
        return self._client

    async def _connect(self) -> None:
        self._stop = asyncio.Event()
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # The library binds a connection to the task that opened it, and cancels that task when the
        # connection is lost: it has a task of its own.
        self._owner = asyncio.create_task(self._own(ready, self._stop), name=f"mcp {self._where}")
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

    async def _unconnected(self) -> Any:
        assert self._owner is not None
        try:
            await self._owner
        except BaseException as error:
            raise self._failed(_why(error)) from error
        raise self._failed("it ended at once")

    async def _own(self, ready: asyncio.Future[Any], stop: asyncio.Event) -> None:
        async with self._open_client() as client:
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

    async def _listed(self, client: Any, seconds: float) -> list[Any]:
        """The tools; a server that does not list them is lost, and `EnvironmentFailed` says so."""
        try:
            found: list[Any] = await self._answer(_all_tools(client), seconds)
        except EnvironmentFailed:
            raise
        except Exception as error:
            await self._lost(client)
            why = f"no answer within {seconds:g} s"
            raise self._failed(why if isinstance(error, TimeoutError) else _why(error)) from error
        return found

    async def _lost(self, client: Any) -> None:
        async with self._connecting:
            if self._client is client:  # and not one that was made anew meanwhile
                await self.close()

    def _failed(self, why: str) -> EnvironmentFailed:
        return EnvironmentFailed(
            f"{self._where}: {why}; check that this MCP server runs",
            tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE,
        )


async def _all_tools(client: Any) -> list[Any]:
    tools: list[Any] = []
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
    of_server = getattr(error, "error", None)  # of an MCPError
    return getattr(of_server, "message", "") or str(error) or repr(error)


def result_text(result: Any) -> str:
    """The texts of an MCP result, those of embedded resources too; a note for each other part.

    Args:
        result: a CallToolResult of the package `mcp`, with `content` and `structured_content`. The
            latter is shown as JSON where the content has no text.
    """
    shown = [_note(part) if (text := _text_of(part)) is None else text for part in result.content]
    if result.structured_content is not None and not any(map(_text_of, result.content)):
        shown = [each for each in shown if each]
        shown.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(shown)


def _text_of(part: Any) -> str | None:
    """The text of a part, or of the resource in it; None: it has none."""
    text = getattr(part, "text", None)
    if text is None:
        text = getattr(getattr(part, "resource", None), "text", None)
    return text if isinstance(text, str) else None


def _note(part: Any) -> str:
    if part.type == "resource_link":
        return f"[resource link: {part.name}, {part.uri}]"
    resource = getattr(part, "resource", part)
    facts = [str(getattr(resource, name, None) or "") for name in ("uri", "mime_type")]
    return f"[{part.type}: {', '.join(filter(None, facts)) or 'no text'}, not shown]"
