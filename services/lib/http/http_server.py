"""The HTTP server: its port, its certificate, its drain."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from aiohttp import web

from services.chassis.errors import ConfigError
from services.chassis.rpc.listen import port_error
from services.lib.http.http_config import HttpConfig

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
        keepalive_timeout=config.idle_connection_seconds,
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
