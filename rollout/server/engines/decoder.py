"""The engine's thread: admit waiting sequences, step all rows, hand tokens out, until paused.

Everything here runs in one thread, calls included (they come through the mailbox between two
steps), so a pause is always at a token boundary and no state needs a lock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from rollout.server.engine import (
    Chunk,
    EngineLoad,
    EngineStateError,
    FinishReason,
    PauseMode,
)
from rollout.server.engines.batch import Batch, Sequence
from rollout.server.engines.mailbox import Mailbox
from rollout.server.engines.model import SlotModel
from rollout.server.rate import TokenRate

__all__ = ["Decoder", "Outbox"]

_FLUSH_SECONDS = 0.05
_PATIENCE_STEPS = 16

Outbox = list[tuple[Sequence, Chunk]]


class Decoder:
    """Owns the model, its rows, and the sequences that wait for one."""

    def __init__(
        self,
        model: SlotModel,
        mailbox: Mailbox,
        deliver: Callable[[Outbox], None],
        *,
        slots: int,
        stream_interval: int,
        prefill_tokens: int,
    ) -> None:
        """`deliver` is called in this thread with every step's chunks."""
        self._model = model
        self._mailbox = mailbox
        self._deliver = deliver
        self._slots = slots
        self._stream_interval = stream_interval
        self._prefill_tokens = prefill_tokens
        self._batch = Batch(model, slots)
        self._waiting: deque[Sequence] = deque()
        self._outbox: Outbox = []
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
        """Move waiting sequences into rows, several at once: a prefill costs as much as a step."""
        self._steps_since_admit += 1
        enough = min(len(self._waiting), max(1, self._slots // 8))
        patient = self._batch and self._steps_since_admit < _PATIENCE_STEPS
        if not self._waiting or not self._batch.free or (patient and self._batch.free < enough):
            return
        admitted: list[Sequence] = []
        tokens = 0
        while self._waiting and len(admitted) < self._batch.free:
            tokens += len(self._waiting[0].token_ids)
            if admitted and tokens > self._prefill_tokens:
                break
            admitted.append(self._waiting.popleft())
        self._batch.admit(admitted, self._prefill_tokens)
        self._steps_since_admit = 0

    def _step(self) -> None:
        ids, logprobs = self._batch.step()
        self._rate.add(len(ids))
        finished: list[int] = []
        now = time.monotonic()
        self._steps_since_flush += 1
        # All rows are flushed in the same step, so that the event loop wakes once for all of them.
        flush = (
            self._steps_since_flush >= self._stream_interval
            or now - self._flushed_at >= _FLUSH_SECONDS
        )
        for row, sequence in enumerate(self._batch.sequences):
            token_id = ids[row]
            sequence.token_ids.append(token_id)
            sequence.logprobs.append(logprobs[row])
            finish = _finish(sequence, token_id)
            if finish is not None:
                finished.append(row)
            if flush or finish is not None or sequence.fresh:
                self._flush(sequence, finish)
        if flush:
            self._steps_since_flush, self._flushed_at = 0, now
        if finished:
            self._batch.remove(finished)

    def _flush(self, sequence: Sequence, finish: FinishReason | None) -> None:
        token_ids = tuple(sequence.token_ids[sequence.sent :])
        if not token_ids and finish is None:
            return
        chunk = Chunk(
            token_ids=token_ids,
            logprobs=tuple(sequence.logprobs),
            weight_version=self.weight_version,
            finish=finish,
        )
        sequence.sent, sequence.fresh = len(sequence.token_ids), False
        sequence.logprobs.clear()
        self._outbox.append((sequence, chunk))

    def _send(self) -> None:
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            self._deliver(outbox)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence, or end it at once during an aborting pause."""
        if self._paused is PauseMode.ABORT:
            self._flush(sequence, FinishReason.INTERRUPTED)
        else:
            self._waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is; no effect if it has ended."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self._batch.sequences:
            self._batch.remove([self._batch.sequences.index(sequence)])

    def pause(self, mode: PauseMode) -> None:
        """Hand out every token, then hold (RETRACT) or end (ABORT) all sequences."""
        held = self._batch.clear()
        for sequence in held:
            self._flush(sequence, None)
        self._waiting.extendleft(reversed(held))
        self._paused = mode
        if mode is PauseMode.ABORT:
            while self._waiting:
                self._flush(self._waiting.popleft(), FinishReason.INTERRUPTED)
        # Before the pause is answered: whoever paused may count on having every token.
        self._send()

    def resume(self) -> None:
        """Go on; held sequences are admitted, and so prefilled, like new ones."""
        if self._released:
            raise EngineStateError("resume: memory is released, restore it first")
        self._paused = None

    def update_weights(self, folder: Path, weight_version: int) -> None:
        """Replace the weights while no row holds anything computed by the old ones."""
        self._require_paused("update_weights")
        if self._released:
            raise EngineStateError("update_weights: memory is released, restore it first")
        self._model.load_weights(folder)
        self.weight_version = weight_version

    def release_memory(self) -> int:
        """Drop cache and weights; return the bytes given back."""
        self._require_paused("release_memory")
        if self._released:
            return 0
        self._released = True
        return self._model.release()

    def restore_memory(self) -> None:
        """Take the weights back from the folder they last came from."""
        if self._released:
            self._model.restore()
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

    def _require_paused(self, call: str) -> None:
        if self._paused is None:
            raise EngineStateError(f"{call}: the engine is running, pause it first")


def _finish(sequence: Sequence, token_id: int) -> FinishReason | None:
    if token_id in sequence.stop_ids:
        return FinishReason.STOP
    if len(sequence.token_ids) >= sequence.limit:
        return FinishReason.LENGTH
    return None
