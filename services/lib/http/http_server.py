"""The HTTP server: its port, its certificate, its drain, and whose requests it refuses.

A page in a browser on this machine can post to any address. What it sends says so (`Origin`); a
page whose own name was made to resolve to this machine (DNS rebinding) sends that name as `Host`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from aiohttp import web

from services.chassis.errors import ConfigError
from services.chassis.rpc.listen import port_error
from services.lib.http.http_config import HttpConfig

IDLE_CONNECTION_SECONDS = 120.0
"""Longest time in which a connection has no call in progress, and in which the headers of a
call arrive; then it is closed."""

_RENEW_SECONDS = 60.0
_LINGERING_SECONDS = 1.0
"""Time for the rest of a body that is not wanted, so that its sender reads the answer."""


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A server that accepts requests."""

    port: int
    _config: HttpConfig
    _runner: web.AppRunner
    _tls: ssl.SSLContext | None

    async def drain(self) -> None:
        """Accept no more connections, and wait until the calls in progress have ended."""
        await self._runner.cleanup()

    async def keep_certificate(self) -> None:
        """Read the certificate again every minute, so that rotated ones need no restart."""
        while True:
            await asyncio.sleep(_RENEW_SECONDS)
            # A file may be missing while it is replaced: keep the current one.
            with suppress(OSError):
                if self._tls is not None:
                    _load(self._tls, self._config)


@asynccontextmanager
async def serving(
    app: web.Application, config: HttpConfig, *, plain: bool = False
) -> AsyncIterator[HttpServer]:
    """Serve `app` within the context; `plain`: without TLS, even if there is a certificate.

    Raises:
        DependencyUnavailable: the port cannot be bound.
        ConfigError: the certificate or its key cannot be used.
    """
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,  # a client that leaves stops the engine's work
        shutdown_timeout=config.drain_seconds,
        auto_decompress=False,
        keepalive_timeout=IDLE_CONNECTION_SECONDS,
        lingering_time=_LINGERING_SECONDS,
    )
    tls = None if plain else _tls(config)
    await runner.setup()
    try:
        site = web.TCPSite(
            runner,
            config.host,
            config.http_port,
            ssl_context=tls,
            backlog=1024,
            reuse_port=config.share_port,
        )
        try:
            await site.start()
        except OSError as error:
            raise port_error(config.host, config.http_port, "http_port", error) from error
        yield HttpServer(runner.addresses[0][1], config, runner, tls)
    finally:
        await runner.cleanup()


def _tls(config: HttpConfig) -> ssl.SSLContext | None:
    if config.tls_cert_file is None or config.tls_key_file is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        _load(context, config)
    except OSError as error:
        raise ConfigError(
            f"tls_cert_file {config.tls_cert_file} and tls_key_file {config.tls_key_file} are not "
            f"a PEM certificate and its private key: {error}"
        ) from error
    return context


def _load(context: ssl.SSLContext, config: HttpConfig) -> None:
    context.load_cert_chain(str(config.tls_cert_file), str(config.tls_key_file))


class ForeignRequestError(Exception):
    """A request to another host, or by a web page of another site: status 403."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code
        """For programs."""


def check_source(headers: Mapping[str, str], scheme: str, config: HttpConfig, table: str) -> None:
    """Check the headers `Host` and `Origin` of a request that came by `scheme`.

    Args:
        table: of the settings of this server, for people.

    Raises:
        ForeignRequestError: it is meant for another host, or is sent by a web page of another site.
    """
    host = headers.get("Host", "")
    if host and _checks_hosts(config) and not _is_allowed(_name(f"//{host}"), config):
        message = (
            f"Host {host[:100]!r} is none of this server's names: request it by its address, or "
            f"add the name to allowed_hosts of [{table}], or set public_url"
        )
        raise ForeignRequestError(message, "host_not_allowed")
    origin = headers.get("Origin")
    if origin is not None and not _is_own(origin, f"{scheme}://{host}", config):
        message = (
            f"Origin {origin[:100]!r} is another site: send no Origin, or add its host to "
            f"allowed_hosts of [{table}]"
        )
        raise ForeignRequestError(message, "origin_not_allowed")


def _checks_hosts(config: HttpConfig) -> bool:
    """Beyond loopback whoever has no token gets nothing, and names are the operator's matter."""
    return bool(config.allowed_hosts) or is_local(config.host) or not config.knows_callers


def _is_allowed(name: str, config: HttpConfig) -> bool:
    public = _name(config.public_url)
    known = (*config.allowed_hosts, *([public] if public else ()), socket.gethostname())
    # An address is not a name that somebody else can point to this machine.
    return is_local(name) or _is_address(name) or name in map(str.lower, known)


def _is_own(origin: str, own: str, config: HttpConfig) -> bool:
    public = urlsplit(config.public_url)
    ours = (own.lower(), f"{public.scheme}://{public.netloc}".lower())
    return origin.lower() in ours or _name(origin) in map(str.lower, config.allowed_hosts)


def is_local(name: str) -> bool:
    """Whether only this machine reaches a host, by name or address."""
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name(url: str) -> str:
    """The host of a URL in small letters; empty: it has none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""
