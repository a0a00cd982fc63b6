"""A proxy between two processes that can simulate a partition: bytes are held back silently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Partition:
    """Forwards to a port of this machine; what was sent while it was cut arrives when it heals.

    Args:
        port: the server's; `listen` has its own.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._whole = asyncio.Event()
        self._whole.set()

    def cut(self) -> None:
        """From now on nothing arrives."""
        self._whole.clear()

    def heal(self) -> None:
        """Everything arrives, late."""
        self._whole.set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        """Serve; gives the port."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            self.heal()
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._whole.wait()
        answers, requests = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(self._pump(reader, requests), self._pump(answers, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()
