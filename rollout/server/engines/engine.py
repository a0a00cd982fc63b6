"""The engine protocol: sample tokens, pause at a token boundary, swap weights.

    EngineError
    ├── EngineStateError     the call does not fit the engine's state: not paused, released, closed
    ├── EngineFailed         the engine died; the process must be restarted
    └── WeightsError         a weights folder cannot be loaded; the old weights stay in use

Bad requests raise `RequestError`, a `ValueError`, before anything reaches the engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

from services.lib.routed_experts import ExpertRecord


class EngineError(Exception):
    """Base of all errors of an engine."""


class EngineStateError(EngineError):
    """The call is not allowed in the engine's state."""


class EngineFailed(EngineError):  # noqa: N818 -- names the event
    """The engine has failed and answers no calls."""


class WeightsError(EngineError):
    """A weights folder is incomplete, damaged or of another model; the old weights stay in use."""


class MemoryNotReleased(EngineError):  # noqa: N818 -- names the event
    """A release freed too little of the device, so that it cannot be lent."""


class RequestError(ValueError):
    """A request that no engine of this vocabulary and context can sample.

    Attributes:
        field: name of the field, such as "token_ids[3]".
        value: its value.
        cure: its valid values.
    """

    def __init__(self, field: str, value: object, cure: str) -> None:
        super().__init__(field, value, cure)
        self.field, self.value, self.cure = field, value, cure

    def __str__(self) -> str:
        return f"{self.field} is {self.value}: {self.cure}"


class ContextLengthError(RequestError):
    """A prefix that leaves no room for a token in the engine's context."""

    def __init__(self, num_tokens: int, max_context: int) -> None:
        cure = f"must be 1 to {max_context - 1}, the engine's context less one"
        super().__init__("the length of token_ids", num_tokens, cure)
        self.num_tokens, self.max_context = num_tokens, max_context


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    """A stop token was sampled; it is the last token of the output."""
    LENGTH = "length"
    """`max_new_tokens` or the engine's context was reached."""
    INTERRUPTED = "interrupted"
    """The engine interrupted the sequence; another server can continue it from its tokens."""


class PauseMode(StrEnum):
    """What happens to running sequences when the engine pauses."""

    RETRACT = "retract"
    """They are held, and prefilled again from their tokens on resume; new requests wait."""
    ABORT = "abort"
    """They end `INTERRUPTED` with their tokens so far; so do new requests until resume."""
    IN_PLACE = "in_place"
    """They are held and keep their KV cache, also across a swap: later tokens are sampled from a
    cache filled by two versions. Only engines with the feature "pause_in_place"."""


class VersionSource(StrEnum):
    """How the weight version of a chunk is known."""

    ENGINE = "engine"
    """The engine reported it for these tokens."""
    SERVER_BOUNDARY = "server_boundary"
    """They came before or after the pause in which this server swapped the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one sequence is sampled."""

    temperature: float = 1.0
    """Divides the logits, 0.001 to 1000; 0 is greedy, with log-probs of temperature 1."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with at least this probability, in (0, 1]."""
    top_k: int = 0
    """Keep this many tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the likeliest one's probability, in [0, 1]."""
    max_new_tokens: int = 256
    """Limit of sampled tokens, stop token included."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the sequence, in addition to the model's end-of-sequence ids."""
    seed: int | None = None
    """Same seed, prefix and weights give the same tokens, also when continued on another server."""
    ignore_eos: bool = False
    """Do not stop at the model's own end-of-sequence ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One sequence to continue.

    Example:
        EngineRequest(request_id="turn-7", token_ids=(5, 9), sampling=Sampling(top_p=0.9))
    """

    request_id: str
    """Id of the request in logs and errors."""
    token_ids: tuple[int, ...]
    """The prefix to continue: the prompt and the tokens sampled so far."""
    sampling: Sampling = field(default_factory=Sampling)
    chunk_seconds: float = 0.0
    """How long an engine may buffer tokens before the end or a pause. 0: its own interval."""
    routed_from: int | None = None
    """Report routed experts of the tokens from this index on, if they are recorded; None: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens of one sequence, all sampled under one weight version."""

    token_ids: tuple[int, ...]
    """New tokens, in order; empty only in a last chunk."""
    logprobs: tuple[float, ...]
    """One per token: natural log, after temperature, before top-p, top-k and min-p."""
    weight_version: int
    """The version all of `token_ids` were sampled under."""
    version_source: VersionSource = VersionSource.ENGINE
    finish: FinishReason | None = None
    """Set on the last chunk of a sequence and on no other."""
    routed: ExpertRecord | None = None
    """Routed experts of the sequence's tokens up to this chunk that were not reported before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Constants of a started engine."""

    name: str
    vocab_size: int
    """Valid token ids are 0 .. vocab_size - 1."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a sequence unless it ignores them."""
    max_context: int
    """Limit of tokens in one sequence, prompt and output together."""
    max_running: int
    """Limit of sequences sampled concurrently; more wait."""
    features: frozenset[str]
    """Optional abilities: "seed", "release_memory", "pause_in_place", "routed_experts" (they are
    recorded), and "restart": `start` works again after a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Current load of an engine."""

    running: int
    queued: int
    """Sequences waiting for a slot, or held by a pause."""
    tokens_per_second: float
    """Sampled tokens per second over the last seconds."""


class Engine(Protocol):
    """Samples tokens for many sequences concurrently. All calls come from one event loop."""

    @property
    def info(self) -> EngineInfo:
        """Constants of this engine; valid after `start`."""
        ...

    @property
    def weight_version(self) -> int:
        """The weight version that the next token is sampled with."""
        ...

    async def start(self) -> None:
        """Load the model and start serving. Raises `ValueError` for an unusable model folder."""
        ...

    def generate(self, request: EngineRequest) -> AsyncIterator[Chunk]:
        """Stream one sequence; closing the iterator ends the sequence within one step.

        Raises `ValueError` for a bad request, before the engine sees it.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Pause at a token boundary. On return every sampled token has been yielded."""
        ...

    async def resume(self) -> None:
        """Resume after `pause`; held sequences are prefilled again. No effect when not paused."""
        ...

    async def prepare_weights(self, folder: Path) -> None:
        """Read and check `folder` into host memory while sampling continues.

        `update_weights` of this folder is then only a swap. A later prepare replaces an earlier
        one; a folder that was not prepared can still be loaded. Raises `WeightsError`.
        """
        ...

    async def update_weights(self, folder: Path, weight_version: int) -> None:
        """Load `folder` in place under `weight_version`; no cache of older weights is kept.

        Raises `EngineStateError` unless paused, `WeightsError` if the folder cannot be loaded.
        """
        ...

    async def release_memory(self) -> int:
        """Free weights and caches; returns their bytes. Needs a pause.

        Raises `MemoryNotReleased` if the device stays occupied; nothing is released then.
        """
        ...

    async def restore_memory(self, folder: Path | None = None, weight_version: int = 0) -> None:
        """Take memory back, with the weights of `folder`, else the last; the engine stays paused.

        Raises `WeightsError` if `folder` cannot be loaded; the memory stays released then.
        """
        ...

    def load(self) -> EngineLoad: ...

    async def wait_failed(self) -> None:
        """Block while the engine is healthy; raise `EngineFailed` once it has failed."""
        ...

    def fail(self, why: str) -> None:
        """Declare the engine failed: running sequences and `wait_failed` raise.

        With the feature "restart", `start` starts it again. No effect on a failed engine.
        """
        ...

    async def close(self) -> None:
        """End every sequence `INTERRUPTED` and stop."""
        ...


@runtime_checkable
class PreparesFiles(Protocol):
    """An engine that reads weights while they arrive; no engine has to."""

    async def prepare_files(self, files: Sequence[Path]) -> None:
        """Read files of the next version into host memory before the rest has arrived.

        `files` are all verified files so far, and may be moved at any time; `prepare_weights` of a
        folder with the very same files then reads the others alone. Nothing is loaded. No effect
        while a prepared version waits for its update, or the memory is released. After a
        `WeightsError` nothing is kept of them.
        """
        ...


def check_request(request: EngineRequest, info: EngineInfo) -> None:
    """Raise `RequestError` for a request that `info`'s engine cannot sample."""
    _check_tokens(request.token_ids, info)
    if request.routed_from is not None:
        _check_range("routed_experts_from", request.routed_from, 0, len(request.token_ids))
    sampling = request.sampling
    if sampling.temperature != 0.0:
        # Lower ones overflow float32 logits; 0 is their limit.
        _check_range("temperature", sampling.temperature, 1e-3, 1e3)
    _check_range("top_k", sampling.top_k, 0, 2**31 - 1)
    _check_range("max_new_tokens", sampling.max_new_tokens, 1, 2**31 - 1)
    if not 0.0 < sampling.top_p <= 1.0:
        raise RequestError("top_p", sampling.top_p, "must be over 0 and at most 1")
    _check_range("min_p", sampling.min_p, 0.0, 1.0)
    for index, token_id in enumerate(sampling.stop_token_ids):
        _check_range(f"stop_token_ids[{index}]", token_id, 0, info.vocab_size - 1)


def _check_tokens(token_ids: tuple[int, ...], info: EngineInfo) -> None:
    length = len(token_ids)
    if not length:
        raise RequestError("the length of token_ids", 0, "must be at least 1")
    if length >= info.max_context:
        raise ContextLengthError(length, info.max_context)
    if min(token_ids) < 0 or max(token_ids) >= info.vocab_size:
        for index, token_id in enumerate(token_ids):
            _check_range(f"token_ids[{index}]", token_id, 0, info.vocab_size - 1)


def _check_range(field: str, value: float, low: float, high: float) -> None:
    # Written so that NaN, which compares false with everything, fails the check.
    if not low <= value <= high:
        raise RequestError(field, value, f"must be {low} to {high}")


class TokenRate:
    """A sliding window over whole seconds: cheap to update at each step, 0 when idle."""

    def __init__(
        self, window_seconds: int = 5, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._window = window_seconds
        self._clock = clock
        self._seconds: deque[tuple[int, int]] = deque(maxlen=window_seconds + 1)

    def add(self, tokens: int) -> None:
        """Count `tokens` as sampled now."""
        second = int(self._clock())
        if self._seconds and self._seconds[-1][0] == second:
            tokens += self._seconds.pop()[1]
        self._seconds.append((second, tokens))

    def per_second(self) -> float:
        """Mean rate over the window, 0 when nothing was sampled in it."""
        now = self._clock()
        recent = [(s, n) for s, n in list(self._seconds) if s > now - self._window - 1]
        if not recent:
            return 0.0
        return sum(n for _, n in recent) / max(1.0, now - recent[0][0])
