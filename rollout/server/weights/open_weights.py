"""Builds the path of weights from the weights service to a rollout server."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
from seamflow.stubs import async_stub
from seamflow.weights.v1.weight_service_pb2_grpc import (
    WeightServiceStub,
    add_WeightServiceServicer_to_server,
)

from rollout.server.config import RolloutServerConfig
from rollout.server.weights.relay_server import RelayAnnouncer, RelayServicer
from rollout.server.weights.transports import TransportContext, build_transports
from rollout.server.weights.weight_cache import WeightCache
from services.chassis.rpc import clients
from services.lib.weight_files.folder_names import MODEL_NAME

if TYPE_CHECKING:
    from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceAsyncStub


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """The parts that fetch and relay weights."""

    stub: WeightServiceAsyncStub
    cache: WeightCache
    """Fetches versions and keeps them on disk."""
    servicers: Sequence[tuple[Callable[[Any, Any], None], Any]] = ()
    """Services for other rollout servers."""
    background: Sequence[Callable[[], Awaitable[None]]] = ()
    """Tasks that run until cancelled."""


async def open_weight_source(
    config: RolloutServerConfig, target: str, stack: AsyncExitStack
) -> WeightSource:
    """Connect to the weights service at `target`; `stack` closes all resources."""
    channels = WeightChannels(config, stack)
    channel = channels.connect(target)
    stub = async_stub(WeightServiceStub, channel)
    names = {"run_id": config.run_id, "model": MODEL_NAME}
    context = TransportContext(config=config, weights=channel, connect=channels.connect)
    folder = config.cache_folder or Path(stack.enter_context(_temporary()))
    cache = WeightCache(
        stub,
        build_transports(context),
        folder,
        **names,
        fetch_seconds=config.weight_fetch_seconds,
        base=config.model,
    )
    source = WeightSource(stub=stub, cache=cache)
    address = config.weight_relay_address
    if address is None or "relay" not in config.weight_transports:
        return source
    return WeightSource(
        stub=stub,
        cache=cache,
        # It implements one call; gRPC answers the others with UNIMPLEMENTED.
        servicers=[(add_WeightServiceServicer_to_server, RelayServicer(cache))],  # type: ignore[abstract]
        background=[RelayAnnouncer(stub, address, config.zone, **names).run],
    )


class WeightChannels:
    """One channel for each address, over `weight_connections`."""

    def __init__(self, config: RolloutServerConfig, stack: AsyncExitStack) -> None:
        """`stack` closes them."""
        self._config = config
        self._channels: dict[str, grpc.aio.Channel] = {}
        stack.push_async_callback(self._close)

    def connect(self, target: str) -> grpc.aio.Channel:
        """The channel to `target`, as "host:port"; the same at each call."""
        if target not in self._channels:
            number = self._config.weight_connections
            self._channels[target] = clients.weights_channel(self._config, target, number)
        return self._channels[target]

    async def _close(self) -> None:
        for channel in self._channels.values():
            await channel.close()


def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="seamflow-weights-")
