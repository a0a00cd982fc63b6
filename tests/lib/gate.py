"""A TCP proxy that can be cut as a network is: nothing is closed, and what was sent comes late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_BLOCK_BYTES = 1 << 16


class Gate:
    """OPEN -> CUT -> OPEN. Bytes on their way when it is cut arrive when it opens again."""

    def __init__(self, target: int) -> None:
        """`target` is a port of this machine."""
        self.port = 0
        self._target = target
        self._open = asyncio.Event()
        self._open.set()
        self._connections: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        """Drop all traffic silently."""
        self._open.clear()

    def heal(self) -> None:
        """Let through what waits, and what comes."""
        self._open.set()

    def point_at(self, target: int) -> None:
        """Lead to another port; what is connected to the old one is disconnected."""
        self._target = target
        for connection in self._connections:
            connection.cancel()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Gate]:
        """Serve on a free port of the loopback while the context lives."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.point_at(0)
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.ensure_future(self._connect(reader, writer))
        self._connections.add(connection)
        with suppress(asyncio.CancelledError, OSError):
            await connection
        self._connections.discard(connection)
        writer.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        answers, requests = await asyncio.open_connection("127.0.0.1", self._target)
        ways = [
            asyncio.ensure_future(self._pass(reader, requests)),
            asyncio.ensure_future(self._pass(answers, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            requests.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_BLOCK_BYTES):
            await self._open.wait()
            writer.write(data)
            await writer.drain()
