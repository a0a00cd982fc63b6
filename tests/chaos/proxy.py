"""A TCP proxy between a client and a server that can lose answers, or hold everything up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_BLOCK_BYTES = 1 << 16


class Proxy:
    """Passes everything on; `swallow` makes it lose the next answer and the connection with it."""

    def __init__(self, target: int) -> None:
        """`target` is a port of this machine."""
        self.port = 0
        self._target = target
        self._swallow = False
        self._before_hold: int | None = None
        self._released = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self.holds = asyncio.Event()
        """Set while nothing passes."""

    def hold(self, after_bytes: int) -> None:
        """Pass on this many bytes of answers, then nothing in either direction until `release`."""
        self._before_hold = after_bytes

    def release(self) -> None:
        """Pass on what waits, in order."""
        self._before_hold = None
        self.holds.clear()
        self._released.set()

    def swallow(self) -> None:
        """Lose the next answer of the server: the command was executed, nobody is told."""
        self._swallow = True

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Proxy]:
        """Serve on a free port of the loopback while the context lives, and its connections."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection("127.0.0.1", self._target)
        passing = [
            asyncio.create_task(self._pass(reader, requests, answers=False)),
            asyncio.create_task(self._pass(answers, writer, answers=True)),
        ]
        try:
            await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            requests.transport.abort()
            writer.transport.abort()
            raise
        finally:
            for each in passing:
                each.cancel()
            requests.close()
            writer.close()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(_BLOCK_BYTES):
                if answers and self._swallow:
                    self._swallow = False
                    return
                if answers:
                    self._count(len(data))
                if self.holds.is_set():
                    await self._released.wait()
                writer.write(data)
                await writer.drain()

    def _count(self, num_bytes: int) -> None:
        """Begin to hold once enough bytes of answers have come."""
        if self._before_hold is None or self.holds.is_set():
            return
        self._before_hold -= num_bytes
        if self._before_hold <= 0:
            self._released.clear()
            self.holds.set()
