"""A turn of the policy as its agent gets it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc.aio

from seamflow.client.messages import from_message
from seamflow.common.v1 import tokens_pb2
from seamflow.errors import SeamflowError, decode
from seamflow.retry import Backoff, may_resume
from seamflow.rollout.v1 import rollout_service_pb2 as pb

if TYPE_CHECKING:
    from seamflow.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpan:
    """A span of sampled tokens of one weight version."""

    start: int
    """Index of its first token, counted from the turn's first sampled one."""
    num_tokens: int
    weight_version: int
    server_id: str


Drift = tokens_pb2.Drift
"""Retokenization drift: the prompt had other ids than were sampled, for the same text.

From `position` the prompt counts as environment tokens. Send the ids that `generate` returned,
or messages, to avoid it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Whether an answer is what was requested."""

    result: str
    """"valid", "invalid" or "unchecked"."""
    reason: str
    """Why it is not valid, or not known to be."""


@dataclass(slots=True, kw_only=True)
class Turn:
    """A turn of the policy; complete once `finish_reason` is set."""

    turn_id: str
    """Id of the turn, which is the idempotency key of the call."""
    message: Mapping[str, Any] = field(default_factory=dict)
    """The answer as a message: append it to the messages of the next turn."""
    raw_text: str = ""
    """The whole answer, special tokens included."""
    parse_error: str = ""
    """Why the answer could not be parsed into a message; `text` then is the whole text."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Natural log-probability of each id after temperature, before top-p and top-k."""
    token_bytes: list[bytes] = field(default_factory=list)
    """Text of each token as bytes, where `return_token_bytes` requested them."""
    spans: list[WeightSpan] = field(default_factory=list)
    """Weight version of each run of tokens."""
    num_prompt_tokens: int = 0
    """Tokens of the prompt, shared prefix included."""
    prompt_token_ids: list[int] = field(default_factory=list)
    """Ids of the whole prompt, where `return_prompt` requested them."""
    prefix_turn_id: str = ""
    """Turn whose record the prompt continues; empty if there is none, all of the prompt is new."""
    prefix_length: int = 0
    """Tokens shared with it."""
    finish_reason: str | None = None
    """"stop" or "length"."""
    stop: str = ""
    """Stop string that ended the turn; empty if there is none."""
    drift: Drift | None = None
    """Retokenization drift of the prompt; None: no drift."""
    opening: str = ""
    """Text with which the answer had to begin; it is part of `message`, but not of `token_ids`."""
    tool_check: Check | None = None
    """Whether the answer has the call that `tool_choice` requires; None: it requires none."""
    schema_check: Check | None = None
    """Whether the content is of the `response_schema`; None: there is none."""

    @property
    def text(self) -> str:
        """Content of the answer, without reasoning and tool calls."""
        content: str = self.message.get("content", "")
        return content

    @property
    def reasoning(self) -> str:
        """Reasoning of the answer."""
        reasoning: str = self.message.get("reasoning_content", "")
        return reasoning

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Tool calls of the answer: id, type, function with name and arguments as JSON."""
        calls: list[dict[str, Any]] = self.message.get("tool_calls", [])
        return calls

    def extend(self, chunk: pb.TokenChunk) -> None:
        """Append a chunk.

        Raises:
            SeamflowError: it does not follow what was received.
        """
        if chunk.offset != len(self.token_ids):
            raise SeamflowError(
                f"turn {self.turn_id!r}: chunk at offset {chunk.offset}, "
                f"expected {len(self.token_ids)}: the gateway broke its contract"
            )
        self.token_ids.extend(chunk.tokens.token_ids)
        self.logprobs.extend(chunk.tokens.logprobs)
        self.token_bytes.extend(chunk.token_bytes)
        self.num_prompt_tokens = chunk.num_prompt_tokens or self.num_prompt_tokens
        self.spans.extend(
            WeightSpan(
                start=chunk.offset + span.start,
                num_tokens=span.num_tokens,
                weight_version=span.weight_version,
                server_id=span.server_id,
            )
            for span in chunk.tokens.spans
        )

    def end(self, end: pb.TurnEnd) -> None:
        """Complete the turn."""
        name = tokens_pb2.FinishReason.Name(end.finish_reason)
        self.finish_reason = name.removeprefix("FINISH_REASON_").lower()
        self.message = from_message(end.message)
        for name in ("raw_text", "parse_error", "num_prompt_tokens", "stop", "opening"):
            setattr(self, name, getattr(end, name))
        self.prompt_token_ids = list(end.prompt_token_ids)
        self.prefix_turn_id, self.prefix_length = end.prefix_turn_id, end.prefix_length
        if end.HasField("drift"):
            self.drift = end.drift
        self.tool_check = _check(end.tool_check)
        self.schema_check = _check(end.schema_check)


def _check(check: pb.AnswerCheck) -> Check | None:
    if not check.result:
        return None
    name = pb.CheckResult.Name(check.result)
    return Check(result=name.removeprefix("CHECK_RESULT_").lower(), reason=check.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task as the dataloader submitted it.

    Example: Task(task_id="train-7@0", payload={"question": "2+2"})
    """

    task_id: str
    """Unique in the run; all rollouts of a group share it."""
    payload: Mapping[str, Any]
    """The fields of the task."""
    train: bool = True
    """Whether its rollouts are trained; False: an evaluation."""


Metadata = tuple[tuple[str, str], ...]


class TurnStream:
    """The chunks of a turn, in order and once each: `async for chunk in stream`.

    Broken connections are resumed at the first missing token. `SeamflowError` is raised for a
    failure that a retry does not cure. Leaving the loop early stops the engine's work.
    """

    def __init__(
        self,
        stub: RolloutServiceAsyncStub,
        request: pb.GenerateRequest,
        metadata: Metadata,
        observe: Callable[[pb.TokenChunk], None] | None = None,
    ) -> None:
        """`observe` is called with each chunk as it arrives, before anything else."""
        self.turn = Turn(turn_id=request.turn_id)
        """What has arrived so far; complete once the stream has ended."""
        self._stub = stub
        self._request = request
        self._metadata = metadata
        self._observe = observe

    def __aiter__(self) -> AsyncIterator[pb.TokenChunk]:
        return self._chunks()

    async def _chunks(self) -> AsyncGenerator[pb.TokenChunk]:
        backoff = Backoff()
        while self.turn.finish_reason is None:
            self._request.resume_from_offset = len(self.turn.token_ids)
            call = self._stub.Generate(self._request, metadata=self._metadata)
            try:
                async for response in call:
                    backoff.reset()
                    if response.HasField("chunk"):
                        yield self._received(response.chunk)
                    elif response.HasField("end"):
                        self.turn.end(response.end)
                if self.turn.finish_reason is None:  # the gateway is draining
                    await backoff.wait()
            except grpc.aio.AioRpcError as failure:
                await _wait_or_raise(decode(failure), backoff)
            finally:
                call.cancel()

    def _received(self, chunk: pb.TokenChunk) -> pb.TokenChunk:
        if self._observe is not None:
            self._observe(chunk)
        self.turn.extend(chunk)
        return chunk


async def _wait_or_raise(error: SeamflowError, backoff: Backoff) -> None:
    if not may_resume(error):
        raise error
    await backoff.wait(error.retry_after)
