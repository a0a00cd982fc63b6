"""Weights and device memory of an SGLang server, in one lifetime of it.

A release of memory is believed only if it was seen: SGLang answers 200 also without its memory
saver, and the trainer would then be given memory that is still occupied.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rollout.server.engines.engine import EngineFailed, MemoryNotReleased, PauseMode, WeightsError
from rollout.server.engines.sglang.http_client import ConnectionLost, Refused
from rollout.server.engines.sglang.model_shapes import ModelFolder, num_ranks
from rollout.server.engines.sglang.server_process import ServerLifetime
from rollout.server.engines.sglang.sglang_turn import Weights
from services.chassis import metrics
from services.chassis.log import get_logger
from services.lib.gpus import MEGABYTE, gpu_fields

UsedBytes = Callable[[], Awaitable[int | None]]
"""Measures the bytes in use on the devices; None: they cannot be measured."""

_GIGABYTE = 1 << 30
_FREED_PART = 0.9
"""Of weights and cache: SGLang rounds what it reports, and others may take a little meanwhile."""


async def used_bytes() -> int | None:
    """Bytes in use on the devices of this process, by whatever process, as nvidia-smi says."""
    rows = await gpu_fields("memory.used", os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not rows or not all(used.isdecimal() for (used, *_) in rows):
        return None
    return sum(int(used) for (used, *_) in rows) * MEGABYTE


async def on_another_host() -> None:
    """An SGLang at a URL may be on another host, where nothing can be measured from here."""


def has_device(server: dict[str, Any]) -> bool:
    """Whether `server`, the answer of /server_info, computes on a device with memory of its own."""
    return bool(server.get("device", "cuda") != "cpu")


def require_memory_saver(server: dict[str, Any]) -> None:
    """Raise `MemoryNotReleased` if a release of `server` would free nothing."""
    if has_device(server) and not server.get("enable_memory_saver"):
        raise MemoryNotReleased(
            "SGLang runs without its memory saver, so that a release frees nothing: set "
            "rollout_server.lends_device = true, or start the SGLang at sglang_url with "
            "--enable-memory-saver"
        )


def num_devices(server: dict[str, Any]) -> int:
    """Devices of `server`: tensor times pipeline times data parallel."""
    sizes = [int(server.get(f"{name}_size") or 1) for name in ("tp", "pp", "dp")]
    # With data-parallel attention its ranks are among those of tensor parallelism.
    return sizes[0] * sizes[1] * (1 if server.get("enable_dp_attention") else sizes[2])


def held_bytes(server: dict[str, Any], model_bytes: int) -> int:
    """Bytes of weights and cache on all devices of `server`; 0: it has none.

    Of the weights what SGLang reports, but no more than `model_bytes`, the files' size: it counts
    all that was allocated while it loaded them.
    """
    if not has_device(server):
        return 0
    states = server.get("internal_states") or []
    usage = [state.get("memory_usage") or {} for state in states]
    part = num_devices(server) * _GIGABYTE / max(1, len(usage))
    weights, cache = (
        sum(float(each.get(name) or 0) for each in usage) * part for name in ("weight", "kvcache")
    )
    return int(min(weights or model_bytes, model_bytes) + cache)


def check_freed(held: int, before: int | None, after: int | None) -> int:
    """Return the bytes that a release freed; those held where they cannot be measured.

    Raises:
        MemoryNotReleased: fewer than nine tenths of the bytes held.
    """
    if not held:
        return 0
    if before is None or after is None:
        get_logger().warning("release_not_measured", believed_bytes=held)
        return held
    freed = before - after
    if freed < _FREED_PART * held:
        raise MemoryNotReleased(
            f"SGLang released {max(freed, 0) / _GIGABYTE:.2f} of the {held / _GIGABYTE:.2f} GiB "
            "that weights and cache hold on the device, so the node keeps it: check that "
            "torch_memory_saver works in SGLang's environment (its log says why not)"
        )
    return freed


_DEGRADED = metrics.counter(
    "rollout_server",
    "weight_tensors_degraded_total",
    "Versions that SGLang read from disk, as it could not take them as tensors.",
)


@dataclass(slots=True, kw_only=True)
class WeightWay:
    """How weights get into SGLang, over its restarts."""

    broadcast_host: str | None = None
    """Where it reaches us for a broadcast; None: it is on this host, or sees its disk."""
    by_tensors: bool = False
    """Through shared memory, as long as that does not end the server."""


class ServerWeights:
    """Loads and flushes, releases and restores; its server must be paused."""

    def __init__(
        self,
        life: ServerLifetime,
        model: ModelFolder,
        *,
        way: WeightWay,
        drain_seconds: float,
        used_bytes: UsedBytes,
    ) -> None:
        """The arguments are those of `SGLangEngine`."""
        self._life, self._model = life, model
        self._way = way
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
        """By a broadcast from us, or through shared memory, or from the server's own disk."""
        connection, host = self._life.connection, self._way.broadcast_host
        if host is None:
            if not (self._way.by_tensors and await self._put_tensors(weights, flush=flush)):
                await connection.update_weights(weights.folder, weights.label, flush=flush)
            return
        from rollout.server.engines.sglang import sent_tensors  # brings torch along

        ranks = num_ranks(await connection.server_info())
        sender = sent_tensors.SGLangBroadcast.of(connection.post, host, ranks)
        await sender.load(weights.folder, weights.label, flush=flush)

    async def _put_tensors(self, weights: Weights, *, flush: bool) -> bool:
        """Through shared memory; False: it may hold a part of them, and must get them all again."""
        from rollout.server.engines.sglang.sent_tensors import SharedTensors  # brings torch along

        connection = self._life.connection
        ranks = num_ranks(await connection.server_info())
        sender = SharedTensors(connection.post, ranks)
        try:
            await sender.load(weights.folder, weights.label, flush=flush)
        except (Refused, WeightsError) as error:
            _DEGRADED.inc()
            get_logger().warning("weights_from_disk_instead", error=str(error))
            return False
        except (ConnectionLost, TimeoutError):
            self._way.by_tensors = False  # or the next server might end in the same way
            raise
        return True

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
        require_memory_saver(server)
        before = await self._used_bytes()
        await self._life.call(self._life.connection.release_memory())
        self._life.released = True
        held = held_bytes(server, self._model.num_bytes)
        try:
            return check_freed(held, before, await self._used_bytes())
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
