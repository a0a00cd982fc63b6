"""The admin port: /healthz (alive), /readyz (dependencies), /metrics, /version; plain HTTP."""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from urllib.parse import urlsplit

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.chassis.config.settings import ServerConfig
from services.chassis.rpc.listen import port_error
from services.chassis.version import version

_REQUEST_SECONDS = 5.0
_JSON = "application/json"

Response = tuple[HTTPStatus, str, bytes]


@asynccontextmanager
async def serving(
    config: ServerConfig, service: str, ready: Callable[[], Awaitable[bool]]
) -> AsyncIterator[int]:
    """Serve the admin pages within the context; yields the bound port, or -1 if there is none.

    Raises:
        DependencyUnavailable: the port cannot be bound.
    """
    if config.admin_port < 0:
        yield -1
        return
    pages = _Pages(service, config, ready)
    try:
        server = await asyncio.start_server(pages.handle, config.host, config.admin_port)
    except OSError as error:
        raise port_error(config.host, config.admin_port, "admin_port", error) from error
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


class _Pages:
    def __init__(
        self, service: str, config: ServerConfig, ready: Callable[[], Awaitable[bool]]
    ) -> None:
        self._identity = {"service": service, "version": version(), "instance": config.instance}
        self._is_local = config.host == "localhost" or _is_loopback(config.host)
        self._ready = ready

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(_render(*await self._respond(head)))
                await writer.drain()
        except (
            TimeoutError,
            ConnectionError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
        ):
            pass  # the client did not finish its request: no response
        finally:
            writer.close()

    async def _respond(self, head: bytes) -> Response:
        if self._is_local and not _names_this_machine(head):
            return HTTPStatus.FORBIDDEN, "text/plain", b"ask by address, or as localhost\n"
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1")
        if method not in (b"GET", b"HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"only GET\n"
        if path == "/healthz":
            return HTTPStatus.OK, "text/plain", b"ok\n"
        if path == "/readyz":
            return await self._readiness()
        if path == "/metrics":
            return HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest()
        if path == "/version":
            return HTTPStatus.OK, _JSON, json.dumps(self._identity).encode()
        return HTTPStatus.NOT_FOUND, "text/plain", b"/healthz /readyz /metrics /version\n"

    async def _readiness(self) -> Response:
        if await self._ready():
            return HTTPStatus.OK, "text/plain", b"ready\n"
        return HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", b"not ready\n"


def _names_this_machine(head: bytes) -> bool:
    """Whether Host is an address or localhost: another name may be a web page's (rebinding)."""
    lines = (line.partition(b":") for line in head.split(b"\r\n"))
    for name, _, value in lines:
        if name.lower() == b"host":
            host = urlsplit(f"//{value.strip().decode('latin-1')}").hostname or ""
            return host == "localhost" or _is_address(host)
    return True


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def _is_loopback(host: str) -> bool:
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def _render(status: HTTPStatus, content_type: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + body
