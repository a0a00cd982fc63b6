"""A proxy that swallows a reply: what the server did, its client does not learn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ReplyThief:
    """Forwards to a port of this machine; once `armed`, it cuts at the next reply."""

    def __init__(self, port: int) -> None:
        """`port` is the server's; `listen` has the proxy's own."""
        self._port = port
        self.armed = False

    @asynccontextmanager
    async def listen(self, port: int = 0) -> AsyncIterator[int]:
        """Serve on `port`, or a free one, which is given."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        async with server:
            yield server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server = await asyncio.open_connection("127.0.0.1", self._port)
        forward = asyncio.create_task(self._pump(reader, to_server[1], steals=False))
        await self._pump(to_server[0], writer, steals=True)
        to_server[1].close()
        await forward

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, steals: bool
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                if steals and self.armed:
                    self.armed = False
                    break
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()
