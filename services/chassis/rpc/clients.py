"""Channels to other seamflow services, and calls that are repeated until they are answered."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import grpc.aio
from seamflow.channel import connect
from seamflow.credentials import Credentials
from seamflow.network.keepalive import KEEPALIVE, WEIGHTS_KEEPALIVE, Keepalive
from seamflow.network.many_connections import ManyConnections

from services.chassis.config.settings import FileSecret, ServerConfig
from services.chassis.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import SecretStr

from collections.abc import Awaitable, Callable
from typing import TypeVar

from seamflow.errors import DeadlineError, SeamflowError
from seamflow.retry import retrying

from services.chassis.log import get_logger
from services.chassis.rpc.status import from_dependency

T = TypeVar("T")


def channel(
    config: ServerConfig, target: str, keepalive: Keepalive = KEEPALIVE
) -> grpc.aio.Channel:
    """A channel to `target` ("host:port") with this process's token and certificate.

    Close it when done: `async with channel(config, config.scheduler) as scheduler_channel`.
    Services start in any order, so calls wait for one that was never reached.

    Raises:
        ConfigError: an address of IPv6 has no brackets, or no port.
    """
    try:
        return connect(target, credentials(config), connect_timeout=None, keepalive=keepalive)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def weights_channel(config: ServerConfig, target: str, connections: int) -> grpc.aio.Channel:
    """As `channel`, to send or receive weights over this number of connections."""
    opened = [channel(config, target, WEIGHTS_KEEPALIVE) for _ in range(connections)]
    return ManyConnections(opened) if connections > 1 else opened[0]


def credentials(config: ServerConfig) -> Credentials:
    return with_token(
        Credentials(
            ca_file=config.tls_ca_file,
            cert_file=config.tls_cert_file,
            key_file=config.tls_key_file,
        ),
        config.token,
    )


def with_token(shown: Credentials, token: SecretStr | None) -> Credentials:
    """The same certificate with this token, whose file, if it has one, may be rotated."""
    if isinstance(token, FileSecret):
        return replace(shown, token=None, token_file=token.path)
    return replace(shown, token=token.get_secret_value() if token else None, token_file=None)


async def retry_forever(name: str, call: Callable[[], Awaitable[T]]) -> T:
    """Retry an idempotent call while its service is unavailable, frozen or busy; log each retry.

    Raises:
        SeamflowError: the service refused the call.
    """

    def report(error: SeamflowError) -> None:
        get_logger().warning("call_retried", call=name, error=str(error))

    while True:
        try:
            return await retrying(call, on_retry=report)
        except DeadlineError as error:
            report(error)


async def call_until_answered(call: Callable[[], Awaitable[T]]) -> T:
    """Call another service on behalf of a caller, while it is unavailable or pushes back.

    The caller's own deadline bounds this: when it passes, gRPC cancels the handler.

    Raises:
        ServiceError: any other failure, passed on.
    """
    try:
        return await retrying(call)
    except SeamflowError as error:
        raise from_dependency(error) from error
