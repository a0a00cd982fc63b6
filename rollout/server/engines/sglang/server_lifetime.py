"""State of an SGLang server from one start to its failure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

from rollout.server.engines.engine import EngineFailed, PauseMode
from rollout.server.engines.sglang.http_client import Connection, ConnectionLost
from rollout.server.engines.sglang.server_process import SGLangProcess
from rollout.server.engines.sglang.sglang_turn import Weights

T = TypeVar("T")

_ABORT_AGAIN_SECONDS = 0.05  # a request on its way to the scheduler outlives an abort


class ServerLifetime:
    """State that a restart resets. Needs a running event loop."""

    def __init__(
        self, connection: Connection, weights: Weights, process: SGLangProcess | None = None
    ) -> None:
        """`weights` are its initial ones; `process` is None for a server that we did not start."""
        self.connection = connection
        self.weights = weights
        """The loaded weights."""
        self.process = process
        self.failed: asyncio.Future[EngineFailed] = asyncio.get_running_loop().create_future()
        """Set to the cause once the server has failed."""
        self.paused: PauseMode | None = None
        self.released = False
        """Whether its memory is released."""
        self.running = 0
        """Requests without a final answer."""
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()
        self.open = asyncio.Event()
        """Set while new requests may be sent."""

    async def call(self, call: Awaitable[T]) -> T:
        """Await a control call; a server that does not answer has failed."""
        try:
            return await call
        except TimeoutError as error:
            cure = "raise sglang_control_seconds if it compiles kernels for that long"
            raise self.fail(f"SGLang does not answer in time: {cure}") from error
        except ConnectionLost as error:
            raise self.fail(f"SGLang does not answer: {error or type(error).__name__}") from error

    async def drain(self, seconds: float) -> None:
        """End all requests; a server that has not ended them after `seconds` has failed."""
        try:
            async with asyncio.timeout(seconds):
                while self.running:
                    await self.call(self.connection.abort_all())
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self.idle.wait(), _ABORT_AGAIN_SECONDS)
        except TimeoutError:
            raise self.fail(
                f"SGLang did not end its requests in {seconds:g} s: raise sglang_drain_seconds if "
                "a step of it takes that long"
            ) from None
        if self.failed.done():
            raise self.failed.result()

    def fail(self, why: str) -> EngineFailed:
        """Mark the server failed and kill its process; returns the first cause."""
        if not self.failed.done():
            self.failed.set_result(EngineFailed(why))
            if self.process is not None:
                self.process.kill()
        return self.failed.result()

    async def end(self) -> None:
        """Disconnect, and stop the process if we started it."""
        await self.connection.close()
        if self.process is not None:
            await self.process.stop()
        self.fail("SGLang is stopped")
