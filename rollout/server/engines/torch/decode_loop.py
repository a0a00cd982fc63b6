"""The engine's thread: admit waiting sequences, step all rows, send their tokens, until paused.

Everything here runs in one thread, calls included (they come through the mailbox between two
steps), so a pause is always at a token boundary and no state needs a lock.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from rollout.server.engines.engine import (
    Chunk,
    EngineLoad,
    EngineStateError,
    FinishReason,
    PauseMode,
    TokenRate,
)
from rollout.server.engines.torch.batch import Batch, DecodedSequence
from rollout.server.engines.torch.transformers_model import LoadedModel
from services.lib.routed_experts import ExpertRecord

T = TypeVar("T")


class Mailbox:
    """The only way into a thread that owns its state: no lock guards anything else."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answers are delivered on `loop`."""
        self._loop = loop
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def post(self, function: Callable[[], None]) -> None:
        """Queue `function`, without waiting for it."""
        self._calls.put(function)

    async def call(self, function: Callable[[], T]) -> T:
        """Queue `function` and await its result."""
        answer: asyncio.Future[T] = self._loop.create_future()
        self._calls.put(lambda: self._run(function, answer))
        return await answer

    def _run(self, function: Callable[[], T], answer: asyncio.Future[T]) -> None:
        try:
            result = function()
        except Exception as error:
            self.notify(_settle, answer, None, error)
        else:
            self.notify(_settle, answer, result, None)

    def notify(self, callback: Callable[..., object], *args: object) -> None:
        """From the thread: call `callback` on the event loop; no effect once the loop is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args)

    def run_pending(self, *, wait: bool) -> None:
        """Run all queued calls; with `wait`, block until there is one."""
        if wait:
            self._calls.get()()
        while not self._calls.empty():
            self._calls.get()()


def _settle(answer: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)


_FLUSH_SECONDS = 0.05
_MAX_DELAY_STEPS = 16

SampledChunks = list[tuple[DecodedSequence, Chunk]]
"""Chunks of one step, each with its sequence."""


class Decoder:
    """Owns the model, its rows and the waiting sequences."""

    def __init__(
        self,
        model: LoadedModel,
        mailbox: Mailbox,
        deliver: Callable[[SampledChunks], None],
        *,
        num_slots: int,
        stream_interval: int,
        prefill_tokens: int,
    ) -> None:
        """`deliver` is called in this thread with every step's chunks."""
        self._model = model
        self._mailbox = mailbox
        self._deliver = deliver
        self._num_slots = num_slots
        self._stream_interval = stream_interval
        self._prefill_tokens = prefill_tokens
        self._batch = Batch(model, num_slots)
        self._waiting: deque[DecodedSequence] = deque()
        self._sampled: SampledChunks = []
        self._paused: PauseMode | None = None
        self._released = False
        self._closed = False
        self._rate = TokenRate()
        self._steps_since_admit = 0
        self._steps_since_flush = 0
        self._flushed_at = time.monotonic()
        self.weight_version = 0

    def run(self) -> None:
        """Serve until closed."""
        while not self._closed:
            self._mailbox.run_pending(wait=self._idle())
            if not self._idle():
                self._admit()
                self._step()
            self._send()

    def _idle(self) -> bool:
        return self._paused is not None or not (self._batch or self._waiting)

    def _admit(self) -> None:
        """Move waiting sequences into the batch, as far as slots and prefill allow."""
        self._steps_since_admit += 1
        if not self._waiting or not self._batch.free or self._delays_admission():
            return
        self._steps_since_admit = 0
        later: list[DecodedSequence] = []
        while self._waiting and self._batch.free and len(later) < self._num_slots:
            if self._batch.unfilled >= self._prefill_tokens:
                break
            sequence = self._waiting.popleft()
            if not self._batch.admit(sequence):
                later.append(sequence)
        self._waiting.extendleft(reversed(later))

    def _delays_admission(self) -> bool:
        """Whether to wait for more free slots: a separate prefill costs as much as a step."""
        enough = min(len(self._waiting), max(1, self._num_slots // 8))
        return (
            not self._model.rows.supports_mixed_batches
            and len(self._batch) > 0
            and self._batch.free < enough
            and self._steps_since_admit < _MAX_DELAY_STEPS
        )

    def _step(self) -> None:
        sampled = self._batch.step(self._prefill_tokens)
        self._rate.add(len(sampled))
        finished: list[DecodedSequence] = []
        now = time.monotonic()
        self._steps_since_flush += 1
        # All rows are flushed in the same step, so that the event loop wakes once for all of them.
        flush = (
            self._steps_since_flush >= self._stream_interval
            or now - self._flushed_at >= _FLUSH_SECONDS
        )
        for sequence, token_id, logprob in sampled:
            sequence.token_ids.append(token_id)
            sequence.logprobs.append(logprob)
            finish = _finish(sequence, token_id)
            if finish is not None:
                finished.append(sequence)
            is_due = sequence.fresh or (flush and now >= sequence.kept_until)
            if is_due or finish is not None:
                self._flush(sequence, finish)
        if flush:
            self._steps_since_flush, self._flushed_at = 0, now
        if finished:
            self._batch.remove(finished)

    def _flush(self, sequence: DecodedSequence, finish: FinishReason | None) -> None:
        token_ids = tuple(sequence.token_ids[sequence.sent :])
        if not token_ids and finish is None:
            return
        chunk = Chunk(
            token_ids=token_ids,
            logprobs=tuple(sequence.logprobs),
            weight_version=self.weight_version,
            finish=finish,
            routed=self._routed(sequence) if token_ids else None,
        )
        sequence.sent, sequence.fresh = len(sequence.token_ids), False
        sequence.kept_until = time.monotonic() + sequence.request.chunk_seconds
        sequence.logprobs.clear()
        self._sampled.append((sequence, chunk))

    def _routed(self, sequence: DecodedSequence) -> ExpertRecord | None:
        """Routed experts of the tokens up to the last one, which the pass before it gave."""
        start, stop = sequence.routed_from, len(sequence.token_ids)
        if start is None:
            return None
        experts = self._model.rows.experts(sequence.slot, start - 1, stop - 1)
        sequence.routed_from = stop
        return None if experts is None else ExpertRecord(start=start, experts_TLK=experts)

    def _send(self) -> None:
        if self._sampled:
            chunks, self._sampled = self._sampled, []
            self._deliver(chunks)

    def submit(self, sequence: DecodedSequence) -> None:
        """Queue a sequence, or end it immediately during an aborting pause."""
        if self._paused is PauseMode.ABORT:
            self._flush(sequence, FinishReason.INTERRUPTED)
        else:
            self._waiting.append(sequence)

    def cancel(self, sequence: DecodedSequence) -> None:
        """Remove a sequence from the queue or the batch; no effect if it has ended."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self._batch.sequences:
            self._batch.remove([sequence])

    def pause(self, mode: PauseMode) -> None:
        """Send every token, then hold (RETRACT) or end (ABORT) all sequences."""
        held = self._batch.clear()
        for sequence in held:
            self._flush(sequence, None)
        self._waiting.extendleft(reversed(held))
        self._paused = mode
        if mode is PauseMode.ABORT:
            while self._waiting:
                self._flush(self._waiting.popleft(), FinishReason.INTERRUPTED)
        # Before the pause is answered, so that the caller then has every token.
        self._send()

    def resume(self) -> None:
        """Resume; held sequences are admitted, and so prefilled, like new ones."""
        if self._released:
            raise EngineStateError("resume: memory is released, restore it first")
        self._paused = None

    def check_update(self) -> None:
        """Raise `EngineStateError` if weights cannot be updated now."""
        self._require_paused("update_weights")
        if self._released:
            raise EngineStateError("update_weights: memory is released, restore it first")

    def update_weights(self, weights: Any, weight_version: int) -> None:
        """Swap in weights from `read_weights`. No row has cached keys or values of the old ones."""
        self.check_update()
        self._model.rows.use_weights(weights)
        self.weight_version = weight_version

    def release_memory(self) -> int:
        """Free cache and weights; returns their bytes."""
        self._require_paused("release_memory")
        if self._released:
            return 0
        self._released = True
        return self._model.rows.release()

    def restore_memory(self, weights: Any, weight_version: int) -> None:
        """Take weights, of the version before or another."""
        if self._released:
            self._model.rows.use_weights(weights)
            self.weight_version = weight_version
            self._released = False

    def close(self) -> None:
        """End every sequence and leave `run`."""
        self.pause(PauseMode.ABORT)
        self._closed = True

    def load(self) -> EngineLoad:
        """Count sequences. Safe from another thread: it only reads lengths."""
        return EngineLoad(
            running=len(self._batch),
            queued=len(self._waiting),
            tokens_per_second=self._rate.per_second(),
        )

    @property
    def released(self) -> bool:
        return self._released

    def _require_paused(self, call: str) -> None:
        if self._paused is None:
            raise EngineStateError(f"{call}: the engine is running, pause it first")


def _finish(sequence: DecodedSequence, token_id: int) -> FinishReason | None:
    if token_id in sequence.stop_ids:
        return FinishReason.STOP
    if len(sequence.token_ids) >= sequence.limit:
        return FinishReason.LENGTH
    return None
