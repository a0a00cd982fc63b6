"""The client of an agent: start a rollout, generate turns, finish it with a reward.

    async with Client("127.0.0.1:50052", run_id="demo") as client:
        rollout = await client.start_rollout()
        turn = await rollout.generate([{"role": "user", "content": "2+2?"}])
        await rollout.finish({"reward": float(turn.text == "4")})

A call survives weight updates, moved nodes and killed servers: it is delayed but loses no token.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from seamflow.channel import CONNECT_TIMEOUT, connect
from seamflow.common.v1 import tokens_pb2
from seamflow.credentials import Credentials
from seamflow.durations import to_duration
from seamflow.errors import SeamflowError, StaleEpochError, UnavailableError, decode
from seamflow.retry import Backoff, retrying
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from seamflow.stubs import async_stub

if TYPE_CHECKING:
    from seamflow.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub

__all__ = ["Client", "Drift", "Observer", "Rollout", "Turn", "WeightSpan"]

Message = Mapping[str, str]
"""{"role": "user", "content": "…"}"""

DEFAULT_CHUNK_SECONDS = 1.0
"""Interval of chunks without `on_tokens`; a killed server loses at most this much work."""
_MAX_CHUNK_SECONDS = 86_400.0
_CALL_SECONDS = 3600.0

Observer = Callable[[str, str, pb.TokenChunk], None]
"""Called with (rollout_id, turn_id, chunk) for every chunk as it arrives, before anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpan:
    """A span of sampled tokens of one weight version."""

    start: int
    """Index of its first token, counted from the turn's first sampled one."""
    num_tokens: int
    """Length."""
    weight_version: int
    """Weights that sampled it."""
    server_id: str
    """Rollout server that sampled it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Retokenization drift: the prompt had other ids than were sampled, for the same text.

    From `position` the prompt counts as environment tokens. Send the ids that `generate` returned,
    or messages, to avoid it.
    """

    position: int
    """Index in the prompt of the first differing token."""
    recorded_text: str
    """Text of the recorded tokens from `position`, at most 200 characters."""
    retokenized_text: str
    """Text of the prompt from `position`, at most 200 characters."""


@dataclass(slots=True, kw_only=True)
class Turn:
    """A turn of the policy; complete once `finish_reason` is set."""

    turn_id: str
    """Id of the turn, which is the idempotency key of the call."""
    text: str = ""
    """The answer without special tokens."""
    token_ids: list[int] = field(default_factory=list)
    """Sampled ids."""
    logprobs: list[float] = field(default_factory=list)
    """Natural log-probability of each id after temperature, before top-p and top-k."""
    spans: list[WeightSpan] = field(default_factory=list)
    """Weight version of each run of tokens."""
    num_prompt_tokens: int = 0
    """Tokens of the prompt, shared prefix included."""
    finish_reason: str | None = None
    """"stop" or "length"."""
    drift: Drift | None = None
    """Retokenization drift of the prompt; None: no drift."""


class Client:
    """A connection to a rollout gateway for one run. Close it, or use `async with`."""

    def __init__(
        self,
        gateway: str,
        *,
        run_id: str,
        credentials: Credentials | None = None,
        connect_timeout: float | None = CONNECT_TIMEOUT,
        observer: Observer | None = None,
    ) -> None:
        self.run_id = run_id
        self._observer = observer
        self._channel = connect(gateway, credentials, connect_timeout=connect_timeout)
        self._stub = async_stub(RolloutServiceStub, self._channel)

    async def start_rollout(
        self,
        rollout_id: str | None = None,
        *,
        lease_token: str = "",
        train: bool = False,
        pinned_weight_version: int | None = None,
    ) -> Rollout:
        """Start a rollout. One without a task lease is recorded but never trained.

        Raises `InvalidRequestError` for `train` without a lease and for a pinned version with it.
        """
        request = pb.StartRolloutRequest(
            run_id=self.run_id,
            rollout_id=rollout_id or uuid.uuid4().hex,
            lease_token=lease_token,
            purpose=tokens_pb2.PURPOSE_TRAIN if train else tokens_pb2.PURPOSE_EVAL,
            pinned_weight_version=pinned_weight_version,
        )
        response = await retrying(lambda: self._stub.StartRollout(request), timeout=_CALL_SECONDS)
        return Rollout(
            self._stub, self.run_id, request.rollout_id, response.credential, self._observer
        )

    async def close(self) -> None:
        """Close the connection; open calls fail."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class Rollout:
    """One episode of an agent on a task."""

    def __init__(
        self,
        stub: RolloutServiceAsyncStub,
        run_id: str,
        rollout_id: str,
        credential: str,
        observer: Observer | None = None,
    ) -> None:
        self.rollout_id = rollout_id
        self._observer = observer
        self._stub = stub
        self._run_id = run_id
        self._credential = credential

    async def generate(
        self,
        messages: Sequence[Message] = (),
        *,
        token_ids: Sequence[int] = (),
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_new_tokens: int = 256,
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
        ignore_eos: bool = False,
        turn_id: str | None = None,
        parent_turn_id: str = "",
        timeout: float = 3600.0,
        chunk_seconds: float | None = None,
        on_tokens: Callable[[tokens_pb2.Tokens], None] | None = None,
    ) -> Turn:
        """Generate one turn from `messages` or `token_ids`, and wait for its end.

        `on_tokens` is called with each recorded chunk. Tokens are recorded and sent at most every
        `chunk_seconds` (0 to 86,400); by default every second, with `on_tokens` as they are
        sampled. Cancelling the call stops the engine's work. Raises `TimeoutError` after `timeout`
        seconds and `SeamflowError` for a failure that a retry does not cure.
        """
        request = pb.GenerateRequest(
            run_id=self._run_id,
            rollout_id=self.rollout_id,
            credential=self._credential,
            turn_id=turn_id or uuid.uuid4().hex,
            parent_turn_id=parent_turn_id,
            messages=[pb.Message(role=m["role"], content=m["content"]) for m in messages],
            token_ids=token_ids,
            sampling=tokens_pb2.SamplingParams(
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                min_p=min_p,
                max_new_tokens=max_new_tokens,
                stop_token_ids=stop_token_ids,
                seed=seed,
                ignore_eos=ignore_eos,
            ),
            chunk_interval=_chunk_interval(chunk_seconds, streaming=on_tokens is not None),
        )
        turn = Turn(turn_id=request.turn_id)
        async with asyncio.timeout(timeout):
            async for chunk in self._stream(request, turn):
                if on_tokens is not None:
                    on_tokens(chunk)
        return turn

    async def finish(self, rewards: Mapping[str, float] | float) -> None:
        """Finish the rollout with its reward, or with several named ones."""
        named = rewards if isinstance(rewards, Mapping) else {"reward": float(rewards)}
        await self._finish(
            rewards=[tokens_pb2.Reward(name=name, value=value) for name, value in named.items()]
        )

    async def fail(self, failure_class: tokens_pb2.FailureClass.ValueType, message: str) -> None:
        """Finish the rollout without a reward; it is replaced by another one."""
        await self._finish(failure_class=failure_class, failure_message=message)

    async def _finish(self, **fields: object) -> None:
        request = pb.FinishRolloutRequest(
            run_id=self._run_id,
            rollout_id=self.rollout_id,
            credential=self._credential,
            **fields,  # type: ignore[arg-type]
        )
        await retrying(lambda: self._stub.FinishRollout(request), timeout=_CALL_SECONDS)

    async def _stream(
        self, request: pb.GenerateRequest, turn: Turn
    ) -> AsyncIterator[tokens_pb2.Tokens]:
        """Stream a turn to its end, resuming broken connections at the first missing token."""
        backoff = Backoff()
        while turn.finish_reason is None:
            request.resume_from_offset = len(turn.token_ids)
            try:
                async for response in self._stub.Generate(request):
                    backoff.reset()
                    if response.HasField("chunk"):
                        if self._observer is not None:
                            self._observer(self.rollout_id, turn.turn_id, response.chunk)
                        _extend(turn, response.chunk)
                        yield response.chunk.tokens
                    elif response.HasField("end"):
                        _finish(turn, response.end)
                        return
                await backoff.wait()  # the stream ended before the turn: the gateway is draining
            except grpc.aio.AioRpcError as failure:
                await _wait_or_raise(decode(failure), backoff)


def _chunk_interval(seconds: float | None, *, streaming: bool) -> Duration:
    if seconds is None:
        seconds = 0.0 if streaming else DEFAULT_CHUNK_SECONDS
    if not 0.0 <= seconds <= _MAX_CHUNK_SECONDS:
        raise ValueError(f"chunk_seconds is {seconds}: must be 0 to {_MAX_CHUNK_SECONDS:g}")
    return to_duration(seconds)


async def _wait_or_raise(error: SeamflowError, backoff: Backoff) -> None:
    # Stale epoch: the store restarted during the call, so a new attempt takes the turn over.
    if isinstance(error, UnavailableError | StaleEpochError) or error.retry_after is not None:
        await backoff.wait(error.retry_after)
        return
    raise error


def _extend(turn: Turn, chunk: pb.TokenChunk) -> None:
    if chunk.offset != len(turn.token_ids):
        raise SeamflowError(
            f"turn {turn.turn_id!r}: chunk at offset {chunk.offset}, "
            f"expected {len(turn.token_ids)}: the gateway broke its contract"
        )
    turn.token_ids.extend(chunk.tokens.token_ids)
    turn.logprobs.extend(chunk.tokens.logprobs)
    turn.spans.extend(
        WeightSpan(
            start=chunk.offset + span.start,
            num_tokens=span.num_tokens,
            weight_version=span.weight_version,
            server_id=span.server_id,
        )
        for span in chunk.tokens.spans
    )


def _finish(turn: Turn, finish: pb.TurnEnd) -> None:
    name = tokens_pb2.FinishReason.Name(finish.finish_reason)
    turn.finish_reason = name.removeprefix("FINISH_REASON_").lower()
    turn.text = finish.text
    turn.num_prompt_tokens = finish.num_prompt_tokens
    if finish.HasField("drift"):
        turn.drift = Drift(
            position=finish.drift.position,
            recorded_text=finish.drift.recorded_text,
            retokenized_text=finish.drift.retokenized_text,
        )
