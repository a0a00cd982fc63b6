"""One life of an SGLang server, from its start to its failure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from rollout.server.engines.engine import EngineFailed, PauseMode
from rollout.server.engines.sglang.http_client import Connection, ConnectionLost
from rollout.server.engines.sglang.server_process import SGLangProcess
from rollout.server.engines.sglang.sglang_turn import Weights

__all__ = ["ServerLifetime"]

T = TypeVar("T")


class ServerLifetime:
    """A server as it is known here: what a new start begins anew. Needs a running event loop."""

    def __init__(
        self, connection: Connection, weights: Weights, process: SGLangProcess | None = None
    ) -> None:
        """`weights` are those it starts with; `process` is it, if it is ours."""
        self.connection = connection
        self.weights = weights
        """What is loaded."""
        self.process = process
        self.failed: asyncio.Future[EngineFailed] = asyncio.get_running_loop().create_future()
        """Why it ended, once it has."""
        self.paused: PauseMode | None = None
        self.released = False
        """Whether its memory is given back."""
        self.running = 0
        """Requests that have not answered to the end."""
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()
        self.open = asyncio.Event()
        """Set while new requests may be sent."""

    async def call(self, call: Awaitable[T]) -> T:
        """Await a control call; a server that does not take it is dead."""
        try:
            return await call
        except (ConnectionLost, TimeoutError) as error:
            raise self.fail(f"SGLang does not answer: {error or type(error).__name__}") from error

    def fail(self, why: str) -> EngineFailed:
        """Be dead from now on, and the process with it; returns the first reason."""
        if not self.failed.done():
            self.failed.set_result(EngineFailed(why))
            if self.process is not None:
                self.process.kill()
        return self.failed.result()

    async def end(self) -> None:
        """Leave the server, and stop it if it is ours."""
        await self.connection.close()
        if self.process is not None:
            await self.process.stop()
        self.fail("SGLang is stopped")
