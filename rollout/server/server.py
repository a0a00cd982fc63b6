"""The rollout server's states: when it takes turns, and under which weights.

    LOADING ──weights current──▶ SERVING ⇄ PAUSED        pause, resume
                                    │ ▲        │
                          release ──┘ │ ◀──────┘ release
                                    ▼ │
                                 RELEASED                 restore
    any ──▶ DRAINING ──▶ the process ends

Only this class changes the engine's weights, and it always pauses the engine first.
"""

from __future__ import annotations

import asyncio
import time
from enum import StrEnum

from rollout.server.engine import Engine, PauseMode
from rollout.server.weights import FetchedWeights, WeightCache
from services.chassis import metrics
from services.chassis.errors import Reason, ServiceError, failed_precondition
from services.chassis.log import get_logger

__all__ = ["RolloutServer", "State"]

_UPDATES = metrics.counter(
    "rollout_server", "weight_updates_total", "Weight versions loaded into the engine."
)
_UPDATE_SECONDS = metrics.histogram(
    "rollout_server", "weight_update_seconds", "Time from pause to resume of a weight update."
)
_VERSION = metrics.gauge("rollout_server", "weight_version", "Weight version loaded now.")


class State(StrEnum):
    """Life of a rollout server; the drawing is at the top of the file."""

    LOADING = "loading"
    """Waits for current weights; turns wait."""
    SERVING = "serving"
    """Takes turns."""
    PAUSED = "paused"
    """Paused on request; turns wait or are given up, as the pause said."""
    RELEASED = "released"
    """Device memory is given back; turns are given up."""
    DRAINING = "draining"
    """Ends; turns are given up."""


class RolloutServer:
    """One engine and its weights; every transition holds one lock."""

    def __init__(self, engine: Engine, cache: WeightCache | None) -> None:
        """`cache` is where newer weights come from; None: version 0 for ever."""
        self.engine = engine
        self._cache = cache
        self._state = State.LOADING
        self._lock = asyncio.Lock()
        self._log = get_logger()

    @property
    def state(self) -> State:
        """The state now."""
        return self._state

    async def start(self) -> None:
        """Start the engine and hold all turns until `begin` has current weights."""
        await self.engine.start()
        await self.engine.pause(PauseMode.RETRACT)

    async def begin(self) -> None:
        """Load the newest committed weights, if any, then take turns."""
        fetched = await self._cache.fetch() if self._cache else None
        async with self._lock:
            if self._state in (State.RELEASED, State.DRAINING):
                return
            if fetched is not None:
                await self._load(fetched)
            if self._state is State.LOADING:
                await self._serve()

    async def pause(self, mode: PauseMode) -> int:
        """Stop at a token boundary; returns how many turns were held or given up."""
        async with self._lock:
            self._refuse("Pause", State.RELEASED, State.DRAINING)
            load = self.engine.load()
            await self.engine.pause(mode)
            self._state = State.PAUSED
            return load.running + load.queued

    async def resume(self) -> None:
        """Take turns again."""
        async with self._lock:
            self._refuse("Resume", State.LOADING, State.RELEASED, State.DRAINING)
            await self._serve()

    async def update(self, weight_version: int | None) -> int:
        """Load a committed version, by default the newest; returns the version in use."""
        fetched = await self._require_cache().fetch(weight_version)
        if fetched is None:
            raise failed_precondition(Reason.WEIGHTS_NOT_LOADED, "no weights are committed yet")
        async with self._lock:
            self._refuse("UpdateWeights", State.RELEASED, State.DRAINING)
            await self._swap(fetched)
            return self.engine.weight_version

    async def follow(self, weight_version: int) -> None:
        """Bring a newly committed version here, and into the engine if it has its memory."""
        fetched = await self._require_cache().fetch(weight_version)
        async with self._lock:
            if fetched is None or fetched.weight_version <= self.engine.weight_version:
                return
            if self._state not in (State.RELEASED, State.DRAINING):
                await self._swap(fetched)
            else:
                self._require_cache().prune(loaded=self.engine.weight_version)

    async def release(self) -> int:
        """Give all turns up and the device memory back; returns the bytes."""
        async with self._lock:
            self._refuse("ReleaseMemory", State.DRAINING)
            await self.engine.pause(PauseMode.ABORT)
            self._state = State.RELEASED
            return await self.engine.release_memory()

    async def restore(self) -> int:
        """Take the memory back and serve, but never under stale weights; returns the version.

        What is newest is asked for first: while the weights service does not answer, the memory
        stays released.
        """
        async with self._lock:
            self._refuse("RestoreMemory", State.LOADING, State.DRAINING)
            if self._state is State.RELEASED:
                fetched = await self._cache.fetch() if self._cache else None
                await self.engine.restore_memory()
                if fetched is not None:
                    await self._load(fetched)
                await self._serve()
            return self.engine.weight_version

    async def drain(self) -> None:
        """Give all turns up for good, so that they go on elsewhere."""
        async with self._lock:
            self._state = State.DRAINING
            await self.engine.pause(PauseMode.ABORT)

    async def _swap(self, fetched: FetchedWeights) -> None:
        """Load weights; turns in flight are held meanwhile, and go on even if loading fails."""
        started = time.perf_counter()
        serving = self._state is State.SERVING
        if serving:
            await self.engine.pause(PauseMode.RETRACT)
        try:
            await self._load(fetched)
        finally:
            if serving:
                await self.engine.resume()
        _UPDATE_SECONDS.observe(time.perf_counter() - started)

    async def _load(self, fetched: FetchedWeights) -> None:
        if fetched.weight_version == self.engine.weight_version:
            return
        await self.engine.update_weights(fetched.folder, fetched.weight_version)
        _UPDATES.inc()
        _VERSION.set(fetched.weight_version)
        self._require_cache().prune(loaded=fetched.weight_version)
        self._log.info("weights_loaded", weight_version=fetched.weight_version)

    async def _serve(self) -> None:
        await self.engine.resume()
        self._state = State.SERVING

    def _require_cache(self) -> WeightCache:
        if self._cache is None:
            raise failed_precondition(Reason.UNSUPPORTED, "this server follows no weights service")
        return self._cache

    def _refuse(self, call: str, *states: State) -> None:
        if self._state in states:
            raise _wrong_state(call, self._state)


def _wrong_state(call: str, state: State) -> ServiceError:
    return failed_precondition(Reason.WRONG_STATE, f"{call}: the server is {state}")
