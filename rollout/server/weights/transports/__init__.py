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
    "relay": "rollout.server.weights.transports.relay_client:Relay",
    "shard_stream": "rollout.server.weights.transports.shard_stream:ShardStream",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportContext:
    """What a transport is made with."""

    config: RolloutServerConfig
    """The server's."""
    weights: grpc.aio.Channel
    """To the weights service."""
    connect: Callable[[str], grpc.aio.Channel]
    """A channel to another server, kept open until this server ends."""


def build_transports(context: TransportContext) -> dict[str, WeightTransport]:
    """Make the transports that the configuration names and can use, in its order.

    `shared_folder` takes part once `weight_folder` says where, `relay` once
    `weight_relay_address` is set. Raises `ConfigError`.
    """
    config = context.config
    usable = {
        "shared_folder": config.weight_folder is not None,
        "relay": config.weight_relay_address is not None,
    }
    names = [name for name in config.weight_transports if usable.get(name, True)]
    if not names:
        given = ", ".join(config.weight_transports) or "empty"
        raise ConfigError(f"weight_transports is {given}: none can be used; add shard_stream")
    return {name: _build(name, context) for name in names}


def _build(name: str, context: TransportContext) -> WeightTransport:
    transport: WeightTransport = plugins.make("weight_transports", name, TRANSPORTS, context)
    return transport
