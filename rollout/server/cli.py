"""Wire a rollout server together and serve it."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from seamflow.rollout.v1.rollout_server_service_pb2_grpc import (
    add_RolloutServerServiceServicer_to_server,
)
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub

from rollout.server.config import RolloutServerConfig
from rollout.server.engines import build_engine
from rollout.server.follower import WeightFollower
from rollout.server.server import RolloutServer, State
from rollout.server.servicer import RolloutServerServicer
from rollout.server.weights import WeightCache
from services.chassis import clients
from services.chassis.errors import ConfigError
from services.chassis.server import Service, run

if TYPE_CHECKING:
    from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceAsyncStub

__all__ = ["build", "main"]

Background = Callable[[], Awaitable[None]]


def main() -> NoReturn:
    """Run `python -m rollout.server`."""
    run("rollout_server", RolloutServerConfig, build)


@asynccontextmanager
async def build(config: RolloutServerConfig) -> AsyncIterator[Service]:
    """Start the engine and what keeps its weights current."""
    async with AsyncExitStack() as stack:
        engine = build_engine(config)
        stack.push_async_callback(engine.close)
        background: list[Background] = [engine.wait_failed]
        if config.weights is None:
            server = RolloutServer(engine, None)
            background.append(server.begin)
        else:
            channel = await stack.enter_async_context(clients.channel(config, config.weights))
            stub: WeightServiceAsyncStub = WeightServiceStub(channel)  # type: ignore[assignment]
            names = {"run_id": config.run_id, "model": config.model_name}
            folder = config.cache_folder or Path(stack.enter_context(_temporary()))
            server = RolloutServer(engine, WeightCache(stub, folder, **names))
            background.append(WeightFollower(server, stub, **names).run)
        await _start(server)
        yield _service(config, server, background)


def _service(
    config: RolloutServerConfig, server: RolloutServer, background: list[Background]
) -> Service:
    async def ready() -> bool:
        return server.state is State.SERVING

    server_id = config.server_id or f"{socket.gethostname()}-{os.getpid()}"
    servicer = RolloutServerServicer(server, server_id=server_id, run_id=config.run_id)
    return Service(
        servicers=[(add_RolloutServerServiceServicer_to_server, servicer)],
        background=background,
        ready=ready,
        drain=server.drain,
    )


async def _start(server: RolloutServer) -> None:
    try:
        await server.start()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="seamflow-weights-")
