"""Entry point: `python -m rollout.server`."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import grpc.aio
from seamflow.network.keepalive import KEEPALIVE, WEIGHTS_KEEPALIVE
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import (
    add_RolloutServerServiceServicer_to_server,
)
from seamflow.stubs import async_stub
from seamflow.weights.v1.weight_service_pb2_grpc import (
    WeightServiceStub,
    add_WeightServiceServicer_to_server,
)

from rollout.server.config import RolloutServerConfig
from rollout.server.engine_lifecycle import EngineLifecycle, State
from rollout.server.engine_supervisor import EngineSupervisor
from rollout.server.engines import build_engine
from rollout.server.engines.engine import PauseMode
from rollout.server.servicer import RolloutServerServicer
from rollout.server.weight_watcher import WeightWatcher
from rollout.server.weights.relay_server import RelayAnnouncer, RelayServicer
from rollout.server.weights.transports import TransportContext, build_transports
from rollout.server.weights.weight_cache import WeightCache
from services.chassis.errors import ConfigError
from services.chassis.rpc import clients
from services.chassis.rpc.server import Service, run
from services.lib.weight_files.folder_names import MODEL_NAME

if TYPE_CHECKING:
    from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceAsyncStub

_WEIGHT_WAIT_SECONDS = 30.0
"""Longest wait for running turns to end, if weight_update_at is "turn"."""
_WEIGHT_PREPARE_SECONDS = 300.0
"""Deadline of reading a version into host memory; then it is loaded from disk."""

Background = Callable[[], Awaitable[None]]
Servicers = Sequence[tuple[Callable[[Any, Any], None], Any]]


def main() -> NoReturn:
    run("rollout_server", RolloutServerConfig, build)


@asynccontextmanager
async def build(config: RolloutServerConfig) -> AsyncIterator[Service]:
    """Start the engine and the tasks that keep its weights current."""
    async with AsyncExitStack() as stack:
        engine = build_engine(config)
        stack.push_async_callback(engine.close)
        background: list[Background] = []
        pause = PauseMode(config.update_pause)
        servicers: Servicers = ()
        server_id = config.server_id or f"{socket.gethostname()}-{os.getpid()}"
        if config.weights is None:
            server = EngineLifecycle(engine, None, update_pause=pause)
            begin = server.begin
            background.append(begin)
        else:
            stub, cache = _open_weights(config, config.weights, stack)
            waits = config.weight_update_at == "turn"
            server = EngineLifecycle(
                engine,
                cache,
                update_pause=pause,
                turn_seconds=_WEIGHT_WAIT_SECONDS if waits else None,
                prepare_seconds=_WEIGHT_PREPARE_SECONDS,
                swap_seconds=config.weight_swap_seconds,
            )
            names = {"run_id": config.run_id, "model": MODEL_NAME}
            watcher = WeightWatcher(server, stub, **names)
            begin = watcher.begin
            background.append(watcher.run)
            address = config.weight_relay_address
            if address is not None and "relay" in config.weight_transports:
                # It implements one call; gRPC answers the others with UNIMPLEMENTED.
                relay = RelayServicer(cache)  # type: ignore[abstract]
                servicers = [(add_WeightServiceServicer_to_server, relay)]
                background.append(RelayAnnouncer(stub, address, config.zone, **names).run)
        background.append(EngineSupervisor(server, begin).run)
        await _start(server)
        yield _service(config, server, server_id, servicers, background)


def _service(
    config: RolloutServerConfig,
    server: EngineLifecycle,
    server_id: str,
    servicers: Servicers,
    background: list[Background],
) -> Service:
    async def ready() -> bool:
        return server.state is State.SERVING

    servicer = RolloutServerServicer(server, server_id=server_id, run_id=config.run_id)
    return Service(
        servicers=[(add_RolloutServerServiceServicer_to_server, servicer), *servicers],
        background=background,
        ready=ready,
        drain=server.drain,
        # With others' servicers it sends weights, too.
        keepalive=WEIGHTS_KEEPALIVE if servicers else KEEPALIVE,
    )


async def _start(server: EngineLifecycle) -> None:
    try:
        await server.start()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _open_weights(
    config: RolloutServerConfig, target: str, stack: AsyncExitStack
) -> tuple[WeightServiceAsyncStub, WeightCache]:
    """Connect to the weights service at `target`; `stack` closes all resources."""
    channels = WeightChannels(config, stack)
    channel = channels.connect(target)
    stub = async_stub(WeightServiceStub, channel)
    context = TransportContext(config=config, weights=channel, connect=channels.connect)
    folder = config.cache_folder or Path(stack.enter_context(_temporary()))
    cache = WeightCache(
        stub,
        build_transports(context),
        folder,
        run_id=config.run_id,
        model=MODEL_NAME,
        fetch_seconds=config.weight_fetch_seconds,
        base=config.model,
    )
    return stub, cache


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
