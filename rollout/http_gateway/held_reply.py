"""A reply that is held back at first, then sent as it comes and kept alive.

While it is held back its status is open, and the client repeats the call if this process ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from aiohttp import web
from aiohttp.web import StreamResponse

from rollout.http_gateway.config import HttpGatewayConfig


class HeldReply:
    """Use it as a context, which keeps the reply alive."""

    def __init__(
        self,
        request: web.Request,
        config: HttpGatewayConfig,
        headers: Mapping[str, str],
        start: bytes,
        keep_alive: Callable[[], bytes],
    ) -> None:
        """`start` is what comes first, `keep_alive` a sign of life."""
        self.has_begun = False
        """Whether its status and first bytes are sent."""
        self._request = request
        self._config = config
        self._response = web.StreamResponse(headers=headers)
        self._start = start
        self._sign = keep_alive
        self._unsent = bytearray()
        self._num_writes = 0
        self._clock = asyncio.get_running_loop().time
        self._held_until = self._clock() + config.hold_seconds
        self._keeping: asyncio.Task[None] | None = None

    async def write(self, data: bytes) -> None:
        """Send `data`, or hold it back."""
        if not data:
            return
        self._num_writes += 1
        self._unsent += data
        if self.has_begun or self._clock() >= self._held_until:
            await self._send()

    async def end(self, data: bytes, headers: Mapping[str, str] | None = None) -> StreamResponse:
        """Send the rest and wait until it is sent; `headers` too, unless the reply has begun.

        Raises:
            ConnectionError: the client has left.
        """
        if not self.has_begun:
            if self._keeping is not None:
                self._keeping.cancel()
            body = self._start + bytes(self._unsent) + data
            response = web.Response(
                body=body, headers={**self._response.headers, **(headers or {})}
            )
            await response.prepare(self._request)
            await response.write_eof()
            return response
        self._unsent += data
        await self._send()
        await self._response.write_eof()
        return self._response

    def cut(self) -> None:
        """Close the connection, for the client to see that the reply is incomplete."""
        if self._request.transport is not None:
            self._request.transport.abort()

    async def _send(self) -> None:
        if not self._response.prepared:
            self._unsent[:0] = self._start
            await self._response.prepare(self._request)
            self.has_begun = True
        elif not self.has_begun:
            return  # another task is sending the head, and sends this after it
        while self._unsent:
            data = bytes(self._unsent)
            self._unsent.clear()
            await self._response.write(data)

    async def _keep_alive(self) -> None:
        await asyncio.sleep(self._config.hold_seconds)
        if self._unsent:
            await self._send()
        while True:
            before = self._num_writes
            await asyncio.sleep(self._config.keep_alive_seconds)
            if self._num_writes == before:
                if not self.has_begun:
                    await self._send()
                await self.write(self._sign())

    async def __aenter__(self) -> Self:
        self._keeping = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
