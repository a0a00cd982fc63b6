"""One rollout of an agent: its turns, and its end."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from google.protobuf.duration_pb2 import Duration

from seamflow import trace_context
from seamflow.client.messages import Message, Tool, ToolChoice, to_messages, to_tool_choice
from seamflow.client.plain_values import named_rewards, whole_text
from seamflow.client.turn import Task, Turn, TurnStream
from seamflow.common.v1 import tokens_pb2
from seamflow.durations import to_duration
from seamflow.retry import retrying
from seamflow.rollout.v1 import rollout_service_pb2 as pb

if TYPE_CHECKING:
    from seamflow.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub
    from seamflow.trajectory.v1.trajectory_pb2 import Trajectory


DEFAULT_CHUNK_SECONDS = 1.0
"""Interval of chunks without `on_tokens`; a killed server loses at most this much work."""
_MAX_CHUNK_SECONDS = 86_400.0
CALL_SECONDS = 3600.0
"""How long calls other than `generate` are retried."""

Observer = Callable[[str, str, pb.TokenChunk], None]
"""Called with (rollout_id, turn_id, chunk) for every chunk as it arrives, before anything else."""


class Rollout:
    """One episode of an agent on a task."""

    def __init__(
        self,
        stub: RolloutServiceAsyncStub,
        *,
        run_id: str,
        rollout_id: str,
        credential: str,
        task: Task | None = None,
        observer: Observer | None = None,
        on_end: Callable[[str], None] | None = None,
    ) -> None:
        """`on_end` is called with the rollout_id once it is finished."""
        self.rollout_id = rollout_id
        self.credential = credential
        """Opens this rollout only: give it to a process that may do nothing else."""
        self.task = task
        """The leased task; None: the rollout was started without one."""
        self.lost = asyncio.Event()
        """Set when its lease is lost: it is replaced, so stop working on it."""
        self._run_id = run_id
        self._stub = stub
        self._observer = observer
        self._on_end = on_end
        self.traceparent = trace_context.of_rollout(run_id, rollout_id)
        """W3C trace context of its calls where `trace_context.current` has none."""
        self._bearer = f"Bearer {credential}"
        self._untrained: list[str] = []

    async def generate(
        self,
        messages: Sequence[Message] = (),
        sampling: tokens_pb2.SamplingParams | None = None,
        *,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        response_schema: Mapping[str, Any] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        token_ids: Sequence[int] = (),
        turn_id: str | None = None,
        parent_turn_id: str = "",
        train: bool = True,
        timeout: float = 3600.0,
        chunk_seconds: float | None = None,
        on_tokens: Callable[[pb.TokenChunk], None] | None = None,
        after_turn_id: str = "",
    ) -> Turn:
        """Generate one turn from `messages` or `token_ids`, and wait for its end.

        `on_tokens` is called with each recorded chunk, which then has its text too. Tokens are
        recorded and sent at most every `chunk_seconds` (0 to 86,400); by default every second, with
        `on_tokens` as they are sampled. With a `tool_choice` or a `response_schema` the answer
        begins as it has to; `Turn.tool_check` and `Turn.schema_check` tell whether it is what was
        requested. With `after_turn_id`, `messages` are those after that turn's answer.
        `train=False` leaves the turn out of training. Cancelling the call stops the engine's work.
        Raises `TimeoutError` after `timeout` seconds and `SeamflowError` for a failure that a retry
        does not cure.
        """
        stream = self.stream(
            messages,
            sampling,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            response_schema=response_schema,
            template_arguments=template_arguments,
            token_ids=token_ids,
            turn_id=turn_id,
            parent_turn_id=parent_turn_id,
            train=train,
            chunk_seconds=chunk_seconds if on_tokens else _whole_turns(chunk_seconds),
            stream_text=on_tokens is not None,
            after_turn_id=after_turn_id,
        )
        async with asyncio.timeout(timeout):
            async for chunk in stream:
                if on_tokens is not None:
                    on_tokens(chunk)
        return stream.turn

    def stream(
        self,
        messages: Sequence[Message] = (),
        sampling: tokens_pb2.SamplingParams | None = None,
        *,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        response_schema: Mapping[str, Any] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        token_ids: Sequence[int] = (),
        turn_id: str | None = None,
        parent_turn_id: str = "",
        train: bool = True,
        chunk_seconds: float | None = None,
        stream_text: bool = True,
        return_prompt: bool = False,
        return_token_bytes: bool = False,
        after_turn_id: str = "",
    ) -> TurnStream:
        """One turn like `generate`, as a stream of its recorded chunks.

        `stream_text` adds text to the chunks, `return_token_bytes` the bytes of each token,
        `return_prompt` the prompt's ids to the turn.
        `messages` are all of the conversation, or those after the answer of `after_turn_id`.
        """
        request = pb.GenerateRequest(
            run_id=self._run_id,
            rollout_id=self.rollout_id,
            turn_id=turn_id or uuid.uuid4().hex,
            parent_turn_id=parent_turn_id,
            sampling=sampling,
            chunk_interval=_chunk_interval(chunk_seconds or 0.0),
            stream_text=stream_text,
            return_prompt_token_ids=return_prompt,
            return_token_bytes=return_token_bytes,
            tool_choice=to_tool_choice(tool_choice, parallel=parallel_tool_calls),
            response_schema_json="" if response_schema is None else json.dumps(response_schema),
        )
        if messages:
            request.messages.CopyFrom(to_messages(messages, tools, template_arguments))
            request.messages.after_turn_id = after_turn_id
        if token_ids:
            request.token_ids.token_ids.extend(token_ids)
        if not train:
            self._untrained.append(request.turn_id)
        return TurnStream(self._stub, request, self._metadata, self._observe(request.turn_id))

    async def finish(
        self,
        rewards: Mapping[str, float] | float,
        *,
        turn_rewards: Mapping[str, Mapping[str, float] | float] | None = None,
        untrained_turn_ids: Sequence[str] = (),
        policy_failure: str | None = "",
        truncated: bool = False,
    ) -> None:
        """Finish the rollout with its reward, or with several named ones.

        `turn_rewards` adds rewards of turns by turn_id; they count for the samples that contain the
        turn. `untrained_turn_ids` are left out of training. `policy_failure` says what the policy
        did wrong, where that ended the rollout. `truncated`: a limit cut it off, such as one of
        steps; a trainer may mask it, or count the value of its last state.
        """
        failure = whole_text(policy_failure or "")
        given = _rewards(rewards, "")
        for turn_id, of_turn in (turn_rewards or {}).items():
            given += _rewards(of_turn, turn_id)
        await self._finish(
            rewards=tokens_pb2.Rewards(rewards=given, policy_failure=failure, truncated=truncated),
            untrained_turn_ids=[*self._untrained, *untrained_turn_ids],
        )

    async def fail(self, failure_class: tokens_pb2.FailureClass.ValueType, message: str) -> None:
        """Finish the rollout without a reward; it is replaced by another one."""
        text = whole_text(message)
        await self._finish(failure=tokens_pb2.Failure(failure_class=failure_class, message=text))

    async def trajectory(self) -> Trajectory:
        """What is recorded of the rollout."""
        request = pb.GetRolloutRequest(run_id=self._run_id, rollout_id=self.rollout_id)
        answer = await retrying(
            lambda: self._stub.GetRollout(request, metadata=self._metadata), timeout=CALL_SECONDS
        )
        return answer.trajectory

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        parent = trace_context.current.get() or self.traceparent
        return ("authorization", self._bearer), (trace_context.HEADER, parent)

    async def _finish(self, **fields: Any) -> None:
        request = pb.FinishRolloutRequest(run_id=self._run_id, rollout_id=self.rollout_id, **fields)
        await retrying(
            lambda: self._stub.FinishRollout(request, metadata=self._metadata),
            timeout=CALL_SECONDS,
        )
        if self._on_end is not None:
            self._on_end(self.rollout_id)

    def _observe(self, turn_id: str) -> Callable[[pb.TokenChunk], None] | None:
        observer = self._observer
        if observer is None:
            return None
        return lambda chunk: observer(self.rollout_id, turn_id, chunk)


def _rewards(rewards: Mapping[str, float] | float, turn_id: str) -> list[tokens_pb2.Reward]:
    named = named_rewards("the agent", rewards)
    return [tokens_pb2.Reward(name=n, value=v, turn_id=turn_id) for n, v in named.items()]


def _whole_turns(seconds: float | None) -> float:
    return DEFAULT_CHUNK_SECONDS if seconds is None else seconds


def _chunk_interval(seconds: float) -> Duration:
    if not 0.0 <= seconds <= _MAX_CHUNK_SECONDS:
        raise ValueError(f"chunk_seconds is {seconds}: must be 0 to {_MAX_CHUNK_SECONDS:g}")
    return to_duration(seconds)
