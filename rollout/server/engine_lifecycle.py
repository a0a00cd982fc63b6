"""The state machine of a rollout server: when it serves turns, and with which weights.

    LOADING ──weights current──▶ SERVING ⇄ PAUSED        pause, resume
                                    │ ▲        │
                          release ──┘ │ ◀──────┘ release
                                    ▼ │
                                 RELEASED                 restore
    any ──▶ DRAINING ──▶ the process ends

Only this class changes the engine's weights, and it always pauses the engine first. A requested
pause survives a restart of the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from enum import StrEnum
from pathlib import Path

from seamflow.weights.v1.weight_service_pb2 import Manifest

from rollout.server.engines.engine import (
    Engine,
    EngineFailed,
    MemoryNotReleased,
    PauseMode,
    PreparesFiles,
)
from rollout.server.weights.merge_lora import is_adapter
from rollout.server.weights.weight_cache import FetchedWeights, WeightCache
from services.chassis import metrics
from services.chassis.errors import Reason, ServiceError, failed_precondition
from services.chassis.log import get_logger
from services.chassis.rpc import tracing
from services.chassis.steady_clock import SteadyClock


class WeightHold:
    """At most one held version; it is held until its time has passed or a hold of 0 s."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._version, self._end = 0, 0.0
        self._changed, self._begun = asyncio.Event(), asyncio.Event()

    @property
    def weight_version(self) -> int | None:
        return self._version if self._clock() < self._end else None

    def set(self, weight_version: int, seconds: float | None) -> None:
        """Hold the version from now on for `seconds`; None changes nothing."""
        if seconds is None:
            return
        self._version, self._end = weight_version, self._clock() + seconds
        self._changed.set()
        if seconds:
            self._begun.set()

    async def ended(self) -> None:
        """Wait until no version is held."""
        while self.weight_version is not None:
            self._changed.clear()
            try:
                async with asyncio.timeout(self._end - self._clock()):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def next_end(self) -> None:
        """Wait for a hold, and until it has ended."""
        await self._begun.wait()
        self._begun.clear()
        await self.ended()


_UPDATES = metrics.counter(
    "rollout_server", "weight_updates_total", "Weight versions loaded into the engine."
)
_UPDATE_SECONDS = metrics.histogram(
    "rollout_server", "weight_update_seconds", "Time from pause to resume of a weight update."
)
_UNPREPARED = metrics.counter(
    "rollout_server", "weight_prepares_expired_total", "Versions loaded without being prepared."
)
_WAITS_EXPIRED = metrics.counter(
    "rollout_server", "weight_waits_expired_total", "Swaps that waited too long.", ("wait",)
)
_VERSION = metrics.gauge("rollout_server", "weight_version", "Weight version loaded now.")


class State(StrEnum):
    """States of a rollout server; transitions are drawn at the top of the file."""

    LOADING = "loading"
    SERVING = "serving"
    PAUSED = "paused"
    """Paused on request; turns wait or are interrupted, depending on the pause mode."""
    RELEASED = "released"
    DRAINING = "draining"


_KEPT_LOADS = 64
_WITHOUT_WEIGHTS = (State.RELEASED, State.DRAINING)


class RunningTurns:
    def __init__(self) -> None:
        self._running: set[asyncio.Future[None]] = set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Register a turn for the duration of this context."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running.add(turn)
        try:
            yield
        finally:
            self._running.discard(turn)
            turn.set_result(None)

    async def ended(self, seconds: float) -> None:
        """Wait for the turns running now, at most so long; later ones do not count."""
        if self._running and (await asyncio.wait(set(self._running), timeout=seconds))[1]:
            _WAITS_EXPIRED.labels("turn").inc()
            get_logger().warning("weights_wait_ended", wait="turn", seconds=seconds)


class EngineLifecycle:
    """One engine and its weights; a lock serializes all transitions."""

    def __init__(
        self,
        engine: Engine,
        cache: WeightCache | None,
        *,
        update_pause: PauseMode = PauseMode.RETRACT,
        turn_seconds: float | None = None,
        prepare_seconds: float = 300.0,
        swap_seconds: float = 300.0,
    ) -> None:
        """Serve with `engine`.

        Args:
            engine: samples the turns.
            cache: fetches newer weights; None: only version 0 is served.
            update_pause: what happens to turns while weights change.
            turn_seconds: longest wait for the running turns to end before a watched version is
                swapped in; None: it is swapped in at the next token.
            prepare_seconds: deadline of reading a version into host memory.
            swap_seconds: deadline of the swap; an engine that misses it counts as failed.
        """
        self.engine = engine
        self.turns = RunningTurns()
        self._cache = cache
        self._update_pause = update_pause
        self._turn_seconds = turn_seconds
        self._prepare_seconds = prepare_seconds
        self._swap_seconds = swap_seconds
        self._stage = State.LOADING
        self._requested_pause: PauseMode | None = None
        self._lock = asyncio.Lock()
        self.hold = WeightHold()
        """The version that is kept though newer ones are committed."""
        self.loaded_versions: deque[tuple[int, float]] = deque(maxlen=_KEPT_LOADS)
        """Versions that were loaded, and when in Unix seconds; oldest first."""
        self._clock = SteadyClock()
        self._log = get_logger()

    @property
    def state(self) -> State:
        if self._stage is State.SERVING and self._requested_pause:
            return State.PAUSED
        return self._stage

    async def start(self) -> None:
        """Start the engine and hold all turns until `begin` has current weights.

        Raises `ValueError` for an engine that cannot start or lacks the pause mode of updates.
        """
        await self.engine.start()
        if not self._can_pause(self._update_pause):
            name = self.engine.info.name
            raise ValueError(f"update_pause is in_place: the {name} engine cannot, use retract")
        await self.engine.pause(self._requested_pause or PauseMode.RETRACT)

    async def restart(self) -> None:
        """Start a failed engine again; turns are held until `begin` has loaded current weights."""
        async with self._lock:
            self._require_not("restart", *_WITHOUT_WEIGHTS)
            self._stage = State.LOADING
            await self.start()

    async def begin(self) -> None:
        """Load the held or else the newest committed weights, if any, then serve turns."""
        fetched = await self._cache.fetch(self.hold.weight_version) if self._cache else None
        async with self._lock:
            if self._stage in _WITHOUT_WEIGHTS:
                return
            if fetched is not None:
                await self._swap(fetched)
            if self._stage is State.LOADING:
                await self._serve()

    async def pause(self, mode: PauseMode) -> int:
        """Pause at a token boundary; returns the number of turns held or interrupted."""
        async with self._lock:
            self._require_not("Pause", *_WITHOUT_WEIGHTS)
            if not self._can_pause(mode):
                name = self.engine.info.name
                raise failed_precondition(
                    Reason.UNSUPPORTED, f"the {name} engine cannot pause in place: use RETRACT"
                )
            load = self.engine.load()
            await self.engine.pause(mode)
            self._requested_pause = mode
            return load.running + load.queued

    async def resume(self) -> None:
        async with self._lock:
            self._require_not("Resume", State.LOADING, *_WITHOUT_WEIGHTS)
            self._requested_pause = None
            await self._serve()

    async def update(self, weight_version: int | None, hold_seconds: float | None = None) -> int:
        """Load a committed version, by default the newest; returns the version in use.

        `follow` is refused for `hold_seconds`; 0 ends an earlier hold. While the memory is
        released, a hold is prolonged but nothing is loaded.
        """
        if weight_version is not None and weight_version == self.hold.weight_version:
            # Files of a version in use may be deleted meanwhile.
            is_current = weight_version == self.engine.weight_version
            if is_current or self._stage is State.RELEASED:
                self.hold.set(weight_version, hold_seconds)
                return self.engine.weight_version
        fetched = await self._require_cache().fetch(weight_version)
        if fetched is None:
            raise failed_precondition(Reason.WEIGHTS_NOT_LOADED, "no weights are committed yet")
        async with self._lock:
            self._require_not("UpdateWeights", *_WITHOUT_WEIGHTS)
            await self._swap(fetched)
            self.hold.set(fetched.weight_version, hold_seconds)
            return self.engine.weight_version

    async def fetch_ahead(self, announced: Manifest) -> Sequence[Path]:
        """Fetch files of a version before its commit, which alone lets it be loaded.

        Returns all of its files that are here.
        """
        arriving = await self._require_cache().fetch_ahead(announced)
        return arriving.complete_paths if arriving else ()

    async def prepare_ahead(self, files: Sequence[Path]) -> None:
        """Have the engine read files of the next version, if it can and has its memory."""
        engine, ready = self.engine, self._stage not in _WITHOUT_WEIGHTS
        if files and ready and isinstance(engine, PreparesFiles) and not is_adapter(files):
            await engine.prepare_files(files)

    async def follow(self, weight_version: int) -> None:
        """Fetch a newly committed version and swap it in, unless memory is released or one is held.

        fetch -> prepare (in host memory, turns continue) -> wait -> pause, update, resume
        """
        fetched = await self._require_cache().fetch(weight_version)
        if fetched is None or fetched.weight_version <= self.engine.weight_version:
            return
        # One that is being restored may have asked for the newest version before this one was.
        async with self._lock:
            if self._stage in _WITHOUT_WEIGHTS:
                self._require_cache().prune(loaded=self.engine.weight_version)
                return
        await self._prepare(fetched)
        if self._turn_seconds is not None:
            await self.turns.ended(self._turn_seconds)
        async with self._lock:
            newer = fetched.weight_version > self.engine.weight_version
            is_held = self.hold.weight_version is not None
            if newer and not is_held and self._stage not in _WITHOUT_WEIGHTS:
                await self._swap(fetched)

    async def release(self) -> int:
        """Interrupt all turns and release the device memory; returns its bytes.

        Raises `MemoryNotReleased` if the device stays occupied; the server is PAUSED then.
        """
        async with self._lock:
            self._require_not("ReleaseMemory", State.DRAINING)
            await self.engine.pause(PauseMode.ABORT)
            before, self._stage = self._stage, State.RELEASED
            try:
                return await self.engine.release_memory()
            except MemoryNotReleased as error:
                # Not RELEASED: whoever reads that would give the device to another.
                self._stage, self._requested_pause = before, PauseMode.ABORT
                self._log.error("memory_not_released", error=str(error))
                raise

    async def restore(self) -> int:
        """Take the memory back and serve with the held or newest weights; returns their version.

        The version is fetched first: while the weights service is unavailable, the memory
        stays released.
        """
        async with self._lock:
            self._require_not("RestoreMemory", State.LOADING, State.DRAINING)
            if self._stage is State.RELEASED:
                version = self.hold.weight_version
                fetched = await self._cache.fetch(version) if self._cache else None
                if fetched is None or fetched.weight_version == self.engine.weight_version:
                    await self.engine.restore_memory()
                else:
                    await self._restore_with(fetched)
                self._requested_pause = None
                await self._serve()
            return self.engine.weight_version

    async def _restore_with(self, fetched: FetchedWeights) -> None:
        """Restore with other weights than the last, which are not loaded on the way."""
        with tracing.span("restore", weight_version=fetched.weight_version):
            async with self._swap_deadline():
                await self.engine.restore_memory(fetched.folder, fetched.weight_version)
        self._loaded(fetched.weight_version)

    async def drain(self) -> None:
        """Interrupt all turns for good, so that they continue on other servers."""
        async with self._lock:
            self._stage = State.DRAINING
            await self.engine.pause(PauseMode.ABORT)

    async def _prepare(self, fetched: FetchedWeights) -> None:
        try:
            async with asyncio.timeout(self._prepare_seconds) as deadline:
                await self.engine.prepare_weights(fetched.folder)
        except TimeoutError:
            if not deadline.expired():
                raise
            # The swap still works; it only stalls turns for longer.
            _UNPREPARED.inc()
            self._log.warning("weights_not_prepared", seconds=self._prepare_seconds)

    async def _swap(self, fetched: FetchedWeights) -> None:
        """Load weights with the turns in flight paused; they continue even if loading fails."""
        started = time.perf_counter()
        serving = self.state is State.SERVING
        with tracing.span("swap", weight_version=fetched.weight_version):
            try:
                async with self._swap_deadline():
                    if serving:
                        await self.engine.pause(self._update_pause)
                    await self._load(fetched)
            finally:
                if serving:
                    await self.engine.resume()
        _UPDATE_SECONDS.observe(time.perf_counter() - started)

    @asynccontextmanager
    async def _swap_deadline(self) -> AsyncIterator[None]:
        """Bound a swap in this context. Raises `EngineFailed` past the deadline."""
        try:
            async with asyncio.timeout(self._swap_seconds) as deadline:
                yield
        except TimeoutError:
            if not deadline.expired():
                raise
            # Its weights are unknown now; only a restart defines them again.
            cure = "raise weight_swap_seconds if its weights are that large"
            why = f"the engine did not load weights within {self._swap_seconds:g} s; {cure}"
            self.engine.fail(why)
            raise EngineFailed(why) from None

    async def _load(self, fetched: FetchedWeights) -> None:
        if fetched.weight_version == self.engine.weight_version:
            return
        await self.engine.update_weights(fetched.folder, fetched.weight_version)
        self._loaded(fetched.weight_version)

    def _loaded(self, weight_version: int) -> None:
        _UPDATES.inc()
        _VERSION.set(weight_version)
        self.loaded_versions.append((weight_version, self._clock()))
        self._require_cache().prune(loaded=weight_version)
        self._log.info("weights_loaded", weight_version=weight_version)

    async def _serve(self) -> None:
        """Serve turns, unless a pause was requested."""
        self._stage = State.SERVING
        if not self._requested_pause:
            await self.engine.resume()

    def _can_pause(self, mode: PauseMode) -> bool:
        return mode is not PauseMode.IN_PLACE or "pause_in_place" in self.engine.info.features

    def _require_cache(self) -> WeightCache:
        if self._cache is None:
            raise failed_precondition(Reason.UNSUPPORTED, "this server has no weights service")
        return self._cache

    def _require_not(self, call: str, *states: State) -> None:
        if self.state in states:
            raise _wrong_state(call, self.state)


def _wrong_state(call: str, state: State) -> ServiceError:
    return failed_precondition(Reason.WRONG_STATE, f"{call}: the server is {state}")
