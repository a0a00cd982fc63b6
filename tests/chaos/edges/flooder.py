"""`python -m tests.chaos.edges.flooder`: a client that never sends a whole request.

Arguments: host:port of the HTTP gateway, a name of `FLOODS`, a file. Its first line says that the
connections are open; a line follows for each that the gateway has closed, and which is opened anew.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from pathlib import Path

from tests.chaos.edges.abuser import BEGUN

CLOSED = "CLOSED"
_LENGTH = 1 << 20
_HEADERS = b"POST /rollouts HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
FLOODS = {
    "idle_connections": b"",
    "slow_headers": _HEADERS + b"X-Slow: ",
    "slow_bodies": _HEADERS + b"Content-Length: %d\r\n\r\n" % _LENGTH,
    "resets": _HEADERS,
}
"""What a connection begins with, by name."""
KEPT_OPEN = ("idle_connections", "slow_headers", "slow_bodies")
"""Floods that hold their connections for as long as they may."""
_CONNECTIONS = 300
_OPENING_SECONDS = 1.0
_BYTE_SECONDS = 0.5
_RESET_SECONDS = 0.02
_RESETS_AT_ONCE = 4
_NO_LINGER = struct.pack("ii", 1, 0)


async def _flood(host: str, port: int, name: str, file: Path) -> None:
    file.write_text(f"{BEGUN}\n")
    if name == "resets":
        await asyncio.gather(*(_reset(host, port) for _ in range(_RESETS_AT_ONCE)))
    await asyncio.gather(*(_hold(host, port, name, file, i) for i in range(_CONNECTIONS)))


async def _hold(host: str, port: int, name: str, file: Path, number: int) -> None:
    await asyncio.sleep(_OPENING_SECONDS * number / _CONNECTIONS)
    while True:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(FLOODS[name])
        closed = asyncio.create_task(reader.read())
        while not closed.done():
            if name != "idle_connections":
                writer.write(b"x")
            await asyncio.wait([closed], timeout=_BYTE_SECONDS)
        closed.exception()
        writer.transport.abort()
        with file.open("a") as lines:
            lines.write(f"{CLOSED}\n")


async def _reset(host: str, port: int) -> None:
    while True:
        _, writer = await asyncio.open_connection(host, port)
        writer.write(FLOODS["resets"])
        await writer.drain()
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        writer.transport.abort()
        await asyncio.sleep(_RESET_SECONDS)


if __name__ == "__main__":
    _host, _port = sys.argv[1].rsplit(":", 1)
    asyncio.run(_flood(_host, int(_port), sys.argv[2], Path(sys.argv[3])))
