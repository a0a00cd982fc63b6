"""Channels to other seamflow services."""

from __future__ import annotations

import grpc.aio
from seamflow.channel import connect
from seamflow.credentials import Credentials

from services.chassis.config.settings import ServerConfig

__all__ = ["channel", "credentials"]


def channel(config: ServerConfig, target: str) -> grpc.aio.Channel:
    """A channel to `target` ("host:port") with this process's token and certificate.

    Close it when done: `async with channel(config, config.scheduler) as scheduler_channel`.
    Services start in any order, so calls wait for one that was never reached.
    """
    return connect(target, credentials(config), connect_timeout=None)


def credentials(config: ServerConfig) -> Credentials:
    """This process's token and certificate."""
    return Credentials(
        token=config.token.get_secret_value() if config.token else None,
        ca_file=config.tls_ca_file,
        cert_file=config.tls_cert_file,
        key_file=config.tls_key_file,
    )
