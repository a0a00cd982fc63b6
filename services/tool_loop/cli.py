"""Entry point: `python -m services.tool_loop`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

from seamflow.environment import EnvironmentFailed
from seamflow.environment.call_error import Guard
from seamflow.environment.environment_servicer import EnvironmentServicer
from seamflow.environment.v1.environment_service_pb2_grpc import (
    add_EnvironmentServiceServicer_to_server,
)

from services.chassis.errors import ConfigError
from services.chassis.log import get_logger
from services.chassis.rpc.server import Service, run
from services.tool_loop.config import ToolLoopConfig
from services.tool_loop.tool_loop import ToolLoop

_IDLE_SECONDS = 3600.0
"""An episode without a call for this long makes room for others."""

_log = get_logger()
_CLOSE_SECONDS = 5.0


@asynccontextmanager
async def build(config: ToolLoopConfig) -> AsyncIterator[Service]:
    """Load functions, connect to MCP servers; what is wrong ends the start."""
    loop = await _opened(config)
    servicer = EnvironmentServicer(loop.declared(), Guard(None), _IDLE_SECONDS)
    try:
        yield Service(servicers=[(add_EnvironmentServiceServicer_to_server, servicer)])
    finally:
        await servicer.episodes.close_all(_CLOSE_SECONDS)
        await loop.close()


async def _opened(config: ToolLoopConfig) -> ToolLoop:
    try:
        loop = ToolLoop(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        await loop.open()
    except (EnvironmentFailed, ValueError) as error:
        await loop.close()
        raise ConfigError(str(error)) from error
    tools = [schema["function"]["name"] for schema in loop.toolbox({}).schemas()]
    _log.info("tool loop ready", tools=tools, rewards=list(config.rewards))
    return loop


def main() -> NoReturn:
    run("tool_loop", ToolLoopConfig, build)
