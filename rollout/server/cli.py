"""Entry point: `python -m rollout.server`."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NoReturn

from seamflow.network.keepalive import KEEPALIVE, WEIGHTS_KEEPALIVE
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import (
    add_RolloutServerServiceServicer_to_server,
)

from rollout.server.config import RolloutServerConfig
from rollout.server.engine_lifecycle import EngineLifecycle, State
from rollout.server.engine_supervisor import EngineSupervisor
from rollout.server.engines import build_engine
from rollout.server.engines.engine import PauseMode
from rollout.server.servicer import RolloutServerServicer
from rollout.server.weight_watcher import WeightWatcher
from rollout.server.weights.open_weights import open_weight_source
from services.chassis.errors import ConfigError
from services.chassis.rpc.server import Service, run
from services.lib.weight_files.folder_names import MODEL_NAME

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
            source = await open_weight_source(config, config.weights, stack)
            waits = config.weight_update_at == "turn"
            server = EngineLifecycle(
                engine,
                source.cache,
                update_pause=pause,
                turn_seconds=_WEIGHT_WAIT_SECONDS if waits else None,
                prepare_seconds=_WEIGHT_PREPARE_SECONDS,
                swap_seconds=config.weight_swap_seconds,
            )
            names = {"run_id": config.run_id, "model": MODEL_NAME}
            watcher = WeightWatcher(server, source.stub, **names)
            begin = watcher.begin
            background += [watcher.run, *source.background]
            servicers = source.servicers
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
