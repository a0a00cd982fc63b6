"""Implementations of `rollout.server.weights.transport.WeightTransport`, one file each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import grpc.aio

from rollout.server.config import RolloutServerConfig
from rollout.server.weights.transport import WeightTransport
from services.chassis import plugins
from services.chassis.errors import ConfigError

__all__ = ["TRANSPORTS", "TransportContext", "build_transports"]

TRANSPORTS = {
    "shared_folder": "rollout.server.weights.transports.shared_folder:SharedFolder",
    "relay": "rollout.server.weights.transports.shard_stream:Relay",
    "shard_stream": "rollout.server.weights.transports.shard_stream:ShardStream",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportContext:
    """Arguments of a transport."""

    config: RolloutServerConfig
    weights: grpc.aio.Channel
    connect: Callable[[str], grpc.aio.Channel]
    """Opens a channel to another server, kept until this server stops."""


def build_transports(context: TransportContext) -> dict[str, WeightTransport]:
    """Build the configured and usable transports, in the configured order.

    `relay` needs `weight_relay_address`. Raises `ConfigError` if none is usable.
    """
    config = context.config
    relays = config.weight_relay_address is not None
    names = [name for name in config.weight_transports if name != "relay" or relays]
    if not names:
        given = ", ".join(config.weight_transports) or "empty"
        raise ConfigError(f"weight_transports is {given}: none can be used; add shard_stream")
    return {name: _build(name, context) for name in names}


def _build(name: str, context: TransportContext) -> WeightTransport:
    transport: WeightTransport = plugins.make("weight_transports", name, TRANSPORTS, context)
    return transport
