"""A bare aiohttp server that answers each request with its body."""

from __future__ import annotations

import sys

import uvloop
from aiohttp import web


async def _echo(request: web.Request) -> web.Response:
    return web.Response(body=await request.read(), content_type="application/json")


def main() -> None:
    """Serve until the process is ended."""
    app = web.Application()
    app.add_routes([web.post("/{path:.*}", _echo)])
    loop = uvloop.new_event_loop()
    web.run_app(
        app, host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None, loop=loop
    )


if __name__ == "__main__":
    main()
