"""A deterministic engine without a model: each token is a pure function of its prefix.

The token after a prefix, and its log-prob, depend on the prefix, the weight version and the seed
only. So a checker that has an agent's tokens detects lost, doubled and mislabelled ones.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rollout.server.config import RolloutServerConfig
from rollout.server.engines.engine import (
    Chunk,
    EngineFailed,
    EngineInfo,
    EngineLoad,
    EngineRequest,
    EngineStateError,
    FinishReason,
    PauseMode,
    TokenRate,
    WeightsError,
    check_request,
)

EOS = 0
_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """The finalizer of splitmix64: 64 bits in, 64 well mixed bits out."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def fold(state: int, token_id: int) -> int:
    """Return the state of a prefix grown by `token_id`."""
    return _mix((state * 0x9E3779B97F4A7C15 + token_id + 1) & _MASK)


def prefix_state(token_ids: Iterable[int]) -> int:
    """Return the 64-bit state of a whole prefix; equal prefixes have equal states."""
    state = 0
    for token_id in token_ids:
        state = fold(state, token_id)
    return state


def fake_token(
    state: int, weight_version: int, seed: int | None, vocab_size: int, mean_tokens: int
) -> int:
    """Return the token that follows a prefix: eos (0) once in `mean_tokens` times, never if 0."""
    value = _mix((state ^ _mix(weight_version * 2 + 1) ^ _mix((seed or 0) * 2)) & _MASK)
    if mean_tokens and value % mean_tokens == 0:
        return EOS
    return 1 + (value >> 20) % (vocab_size - 1)


def fake_logprob(state: int, weight_version: int, seed: int | None) -> float:
    """Return the log-prob of the token that follows a prefix, in [-ln 2, 0)."""
    value = _mix((state ^ _mix(weight_version * 2 + 1) ^ _mix((seed or 0) * 2 + 1)) & _MASK)
    return -math.log(2.0) * ((value >> 11) + 1) / (1 << 53)


@dataclass(slots=True, eq=False)
class _Sequence:
    request: EngineRequest
    state: int
    length: int
    kept_until: float
    produced: int = 0
    chunks: asyncio.Queue[Chunk | EngineFailed] = field(default_factory=asyncio.Queue)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class FakeEngine:
    """Serves `fake_token` for many sequences in steps, with all states of a real engine."""

    def __init__(
        self, config: RolloutServerConfig, step: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """`step` is awaited after each token boundary; by default it sleeps as configured."""
        self._info = EngineInfo(
            name="fake",
            vocab_size=config.fake_vocab_size,
            eos_token_ids=(EOS,),
            max_context=config.max_context or 4096,
            max_running=config.max_running,
            features=frozenset({"seed", "release_memory", "pause_in_place"}),
        )
        self._stream_interval = config.stream_interval
        self._mean_tokens = config.fake_mean_tokens
        self._step = step or (lambda: asyncio.sleep(config.fake_step_seconds))
        self._weight_version = 0
        self._running: list[_Sequence] = []
        self._queued: deque[_Sequence] = deque()
        self._paused: PauseMode | None = None
        self._released = False
        self._wake = asyncio.Event()
        self._rate = TokenRate()
        self._task: asyncio.Task[None] | None = None

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def weight_version(self) -> int:
        return self._weight_version

    async def start(self) -> None:
        self._failed: asyncio.Future[EngineFailed] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="fake-engine")
        self._task.add_done_callback(self._ended)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._admit()
            for sequence in list(self._running):
                self._sample(sequence)
            self._rest()
            await self._step()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            failed = EngineFailed(f"the fake engine's task ended: {task.exception()}")
            failed.__cause__ = task.exception()
            self._fail(failed)

    def fail(self, why: str) -> None:
        if self._task is not None:
            self._task.cancel()
            self._fail(EngineFailed(why))

    def _fail(self, failed: EngineFailed) -> None:
        if not self._failed.done():
            self._failed.set_result(failed)
            for sequence in (*self._running, *self._queued):
                sequence.chunks.put_nowait(failed)

    def _admit(self) -> None:
        while self._queued and len(self._running) < self._info.max_running:
            self._running.append(self._queued.popleft())

    def _sample(self, sequence: _Sequence) -> None:
        seed = sequence.request.sampling.seed
        version, vocab_size = self._weight_version, self._info.vocab_size
        token_id = fake_token(sequence.state, version, seed, vocab_size, self._mean_tokens)
        sequence.token_ids.append(token_id)
        sequence.logprobs.append(fake_logprob(sequence.state, version, seed))
        sequence.state = fold(sequence.state, token_id)
        sequence.length += 1
        sequence.produced += 1
        self._rate.add(1)
        finish = self._finish(sequence, token_id)
        if finish is not None:
            self._running.remove(sequence)
        is_full = len(sequence.token_ids) >= self._stream_interval
        if finish is not None or (is_full and time.monotonic() >= sequence.kept_until):
            self._flush(sequence, finish)

    def _finish(self, sequence: _Sequence, token_id: int) -> FinishReason | None:
        sampling = sequence.request.sampling
        stops = token_id == EOS and not sampling.ignore_eos
        if stops or token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        full = sequence.length >= self._info.max_context
        if full or sequence.produced >= sampling.max_new_tokens:
            return FinishReason.LENGTH
        return None

    def _flush(self, sequence: _Sequence, finish: FinishReason | None) -> None:
        chunk = Chunk(
            token_ids=tuple(sequence.token_ids),
            logprobs=tuple(sequence.logprobs),
            weight_version=self._weight_version,
            finish=finish,
        )
        sequence.token_ids, sequence.logprobs = [], []
        sequence.kept_until = time.monotonic() + sequence.request.chunk_seconds
        if chunk.token_ids or finish is not None:
            sequence.chunks.put_nowait(chunk)

    def _rest(self) -> None:
        if self._paused is None and (self._running or self._queued):
            self._wake.set()
        else:
            self._wake.clear()

    async def generate(self, request: EngineRequest) -> AsyncIterator[Chunk]:
        check_request(request, self._info)
        sequence = self._submit(request)
        try:
            while True:
                chunk = await sequence.chunks.get()
                if isinstance(chunk, EngineFailed):
                    raise chunk
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            self._forget(sequence)

    def _submit(self, request: EngineRequest) -> _Sequence:
        if self._task is None:
            raise EngineStateError("generate: the engine is not started")
        if self._failed.done():
            raise self._failed.result()
        sequence = _Sequence(
            request,
            prefix_state(request.token_ids),
            len(request.token_ids),
            time.monotonic() + request.chunk_seconds,
        )
        if self._paused is PauseMode.ABORT:
            self._flush(sequence, FinishReason.INTERRUPTED)
        else:
            self._queued.append(sequence)
            self._rest()
        return sequence

    def _forget(self, sequence: _Sequence) -> None:
        for sequences in (self._running, self._queued):
            if sequence in sequences:
                sequences.remove(sequence)
        self._rest()

    async def pause(self, mode: PauseMode) -> None:
        """Stop at a token boundary: a step never yields to the event loop while it samples.

        A retract and a pause in place are the same: there is no cache to keep.
        """
        for sequence in self._running:
            self._flush(sequence, None)
        self._queued.extendleft(reversed(self._running))
        self._running.clear()
        self._paused = mode
        if mode is PauseMode.ABORT:
            self._interrupt()
        self._rest()

    def _interrupt(self) -> None:
        while self._queued:
            self._flush(self._queued.popleft(), FinishReason.INTERRUPTED)

    async def resume(self) -> None:
        if self._released:
            raise EngineStateError("resume: memory is released, restore it first")
        self._paused = None
        self._rest()

    async def prepare_weights(self, folder: Path) -> None:
        """Check that the folder exists; its content is not read."""
        if not folder.is_dir():  # noqa: ASYNC240 -- one stat
            raise WeightsError(f"{folder}: no such folder")

    async def update_weights(self, folder: Path, weight_version: int) -> None:
        """Take `weight_version`; the folder must exist."""
        self._require_paused("update_weights")
        await self.prepare_weights(folder)
        self._weight_version = weight_version

    async def release_memory(self) -> int:
        """Nothing is held: 0 bytes."""
        self._require_paused("release_memory")
        self._released = True
        return 0

    async def restore_memory(self, folder: Path | None = None, weight_version: int = 0) -> None:
        if folder is not None:
            await self.update_weights(folder, weight_version)
        self._released = False

    def _require_paused(self, call: str) -> None:
        if self._paused is None:
            raise EngineStateError(f"{call}: the engine is running, pause it first")

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=len(self._running),
            queued=len(self._queued),
            tokens_per_second=self._rate.per_second(),
        )

    async def wait_failed(self) -> None:
        if self._task is None:
            raise EngineStateError("wait_failed: the engine is not started")
        raise await asyncio.shield(self._failed)

    async def close(self) -> None:
        await self.pause(PauseMode.ABORT)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
