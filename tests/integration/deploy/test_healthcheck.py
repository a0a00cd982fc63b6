"""What a container's health check sees."""

from __future__ import annotations

import asyncio
import socket

from services.chassis.config.settings import ServerConfig
from services.chassis.rpc import admin
from services.chassis.rpc.healthcheck import main, ready


async def _seen(is_ready: bool) -> bool:
    async def answer() -> bool:
        return is_ready

    async with admin.serving(ServerConfig(), "test", answer) as port:
        return await asyncio.to_thread(ready, f"127.0.0.1:{port}")


async def test_it_is_the_process_s_own_readiness() -> None:
    """Ready is ready, not ready is not."""
    assert await _seen(True)
    assert not await _seen(False)


def test_a_closed_port_is_not_ready() -> None:
    """A closed port has exit code 1; no argument is a usage error."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert main([f"127.0.0.1:{unused.getsockname()[1]}"]) == 1
    assert main([]) == 64
