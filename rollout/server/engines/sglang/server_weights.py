"""Weights and device memory of an SGLang server, in one lifetime of it."""

from __future__ import annotations

import asyncio

from rollout.server.engines.engine import EngineFailed, MemoryNotReleased, PauseMode, WeightsError
from rollout.server.engines.sglang import device_memory
from rollout.server.engines.sglang.http_client import Refused
from rollout.server.engines.sglang.model_shapes import ModelFolder, num_ranks
from rollout.server.engines.sglang.server_lifetime import ServerLifetime
from rollout.server.engines.sglang.sglang_turn import Weights

__all__ = ["ServerWeights"]


class ServerWeights:
    """Loads and flushes, releases and restores; its server must be paused."""

    def __init__(
        self,
        life: ServerLifetime,
        model: ModelFolder,
        *,
        broadcast_host: str | None,
        drain_seconds: float,
        used_bytes: device_memory.UsedBytes,
    ) -> None:
        """The arguments are those of `SGLangEngine`."""
        self._life, self._model = life, model
        self._broadcast_host = broadcast_host
        self._drain_seconds = drain_seconds
        self._used_bytes = used_bytes

    async def update(self, weights: Weights) -> None:
        """Load other weights. Raises `WeightsError`, after which the last are loaded again."""
        in_place = self._life.paused is PauseMode.IN_PLACE
        if not in_place:
            await self.flush()
        try:
            await self.load(weights, flush=not in_place)
        except (Refused, WeightsError) as error:
            # SGLang rolls back by reading the new folder again: only a load makes them old again.
            await self._reload()
            raise WeightsError(f"{weights.folder}: {error}") from error

    async def load(self, weights: Weights, *, flush: bool) -> None:
        """Load weights. Raises `Refused` or `WeightsError`: they may be of neither version."""
        await self._life.call(self._put(weights, flush=flush))
        self._life.weights = weights

    async def _put(self, weights: Weights, *, flush: bool) -> None:
        """From the server's own disk, or by a broadcast from us."""
        connection, host = self._life.connection, self._broadcast_host
        if host is None:
            await connection.update_weights(weights.folder, weights.label, flush=flush)
            return
        from rollout.server.engines.sglang import weight_broadcast  # brings torch along

        ranks = num_ranks(await connection.server_info())
        sender = weight_broadcast.SGLangBroadcast.of(connection.post, host, ranks)
        await sender.load(weights.folder, weights.label, flush=flush)

    async def _reload(self) -> None:
        try:
            await self.load(self._life.weights, flush=self._life.paused is not PauseMode.IN_PLACE)
        except (Refused, WeightsError) as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> EngineFailed:
        return self._life.fail(f"SGLang cannot load its last weights again: {error}")

    async def flush(self, *, abort: bool = False) -> None:
        """Drop the prefix cache, which also shows that nothing runs."""
        try:
            async with asyncio.timeout(self._drain_seconds):
                await self._life.call(self._life.connection.flush_when_idle(abort=abort))
        except TimeoutError:
            raise self._life.fail("SGLang stays busy: does another client use it?") from None

    async def release(self) -> int:
        """Give weights and cache back; the bytes freed. Undone if it raises `MemoryNotReleased`."""
        await self.flush()
        server = await self._life.call(self._life.connection.server_info())
        device_memory.require_memory_saver(server)
        before = await self._used_bytes()
        await self._life.call(self._life.connection.release_memory())
        self._life.released = True
        held = device_memory.held_bytes(server, self._model.num_bytes)
        try:
            return device_memory.check_freed(held, before, await self._used_bytes())
        except MemoryNotReleased:
            await self.restore(self._life.weights)
            raise

    async def restore(self, weights: Weights) -> None:
        """Take released memory back, with weights; if they cannot be loaded, it stays released."""
        await self._life.call(self._life.connection.resume_memory())
        try:
            await self.load(weights, flush=True)
        except (Refused, WeightsError) as error:
            if weights is self._life.weights:
                raise self._lost(error) from error
            await self._life.call(self._life.connection.release_memory())
            raise WeightsError(f"{weights.folder}: {error}") from error
        self._life.released = False
