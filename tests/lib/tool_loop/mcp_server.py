"""An MCP server of the tests, a program: over standard input and output, or HTTP on a port."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("tests")
counter = {"n": 0}


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def count() -> int:
    """Counts its calls."""
    counter["n"] += 1
    return counter["n"]


@server.tool()
def picture() -> Image:
    """Returns an image."""
    return Image(data=b"\x89PNG", format="png")


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
async def sleepy() -> str:
    """Answers too late, without holding the server."""
    import anyio

    await anyio.sleep(30)
    return "late"


@server.tool()
async def stuck() -> str:
    """Holds the whole server."""
    time.sleep(30)
    return "late"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
