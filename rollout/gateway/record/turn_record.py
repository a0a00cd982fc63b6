"""The record of one turn: its tokens, and the writes that bring them into the store."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.trajectory.v1 import trajectory_service_pb2 as store_pb

from rollout.gateway.prompt.token_text import StopStrings
from rollout.gateway.record import packed_tokens
from services.chassis.errors import already_exists
from services.lib.token_bytes import BYTES_PER_TOKEN, pack_ids, unpack_ids

if TYPE_CHECKING:
    from rollout.gateway.prompt.answer.response_format import Answer
    from rollout.gateway.prompt.prompt import Prompt
    from rollout.gateway.record.recorder import Recorder

_ENDED = (tokens_pb2.FINISH_REASON_STOP, tokens_pb2.FINISH_REASON_LENGTH)


class TurnRecord:
    """Writes under the epoch of one attempt; a stale epoch is refused by the store.

    The turn's environment tokens are written together with its first sampled ones.
    """

    def __init__(
        self,
        begin: store_pb.NewTurn,
        prompt: Prompt,
        begun: store_pb.BegunTurn,
        recorder: Recorder,
    ) -> None:
        self.begin = begin
        self.begun = begun
        self.prompt = prompt
        self._recorder = recorder
        self._epoch = begun.epoch
        self._num_stored = packed_tokens.num_tokens(begun.tokens)
        self._num_routed = 0
        self._unrecorded = tokens_pb2.PackedTokens()
        stored = begun.tokens
        if not self._num_stored:
            stored = self._unrecorded = packed_tokens.environment(prompt.remaining_ids(begun))
        end = packed_tokens.num_environment(stored) * BYTES_PER_TOKEN
        if not stored.token_ids[:end].endswith(pack_ids(prompt.opening_ids)):
            raise already_exists("turn", begin.turn_id)  # with another opening of its answer
        self._packed_prompt = begun.prefix_token_ids + stored.token_ids[:end]
        self.prompt_ids: Sequence[int] = unpack_ids(self._packed_prompt)
        """The shared prefix and this turn's environment tokens."""
        self._packed_answer = bytearray(stored.token_ids[end:])
        self.drift = prompt.drift(begun)
        self.prefix_turn_id = begun.prefix_turn_id
        """Turn that the prompt continues; empty if there is none."""
        self.prefix_length = len(begun.prefix_token_ids) // BYTES_PER_TOKEN
        """Tokens shared with it."""
        self.stop_strings = StopStrings(
            prompt.template, begin.sampling.stop, self.sampled_ids if begin.sampling.stop else ()
        )
        self.answer_end = prompt.constraint.end(prompt.template, prompt.conversation)
        """Finds where its answer has to end; None: only where the policy ends it."""
        self._is_complete = self._has_complete_answer()
        self.is_closed = begun.finish_reason in _ENDED
        """Whether the store has the turn's end."""
        self.finish_reason = begun.finish_reason or self._finish_reason_of_tokens()
        """UNSPECIFIED while the turn continues."""

    @property
    def has_ended(self) -> bool:
        """Whether all tokens of the turn are sampled."""
        return self.finish_reason in _ENDED

    @property
    def num_sampled(self) -> int:
        """Sampled tokens that are recorded, or are being recorded."""
        return len(self._packed_answer) // BYTES_PER_TOKEN

    @property
    def sampled_ids(self) -> list[int]:
        return unpack_ids(bytes(self._packed_answer))

    @property
    def packed_ids(self) -> bytes:
        """Prompt and sampled tokens as little-endian int32."""
        return self._packed_prompt + bytes(self._packed_answer)

    @property
    def routed_from(self) -> int:
        """First token, of prefix and turn, without routed experts of this attempt."""
        return self.prefix_length + self._num_routed

    @cached_property
    def stop(self) -> str | None:
        """Stop string that ended the turn, for one that has ended; None if there is none."""
        return self.stop_strings.found(self.sampled_ids)

    @cached_property
    def answer(self) -> Answer:
        """The sampled tokens as a message. Only for a turn that has ended."""
        return self.prompt.parse_answer(self.sampled_ids, self.stop)

    async def append(self, response: server_pb.GenerateTokensResponse) -> None:
        """Record sampled tokens; returns when the store has acknowledged them.

        Routed experts are of tokens up to these, counted from the first of the prefix.

        Raises:
            ServiceError: the store refused this append.
        """
        new = response.tokens
        self.finish_reason = response.finish_reason
        self._packed_answer += new.token_ids
        is_routed = response.HasField("routed_experts")
        experts = self._own(response.routed_experts) if is_routed else None
        if new.token_ids or experts is not None:
            await self._append(new, experts)

    def _own(self, routed: tokens_pb2.RoutedExperts) -> tokens_pb2.RoutedExperts | None:
        """Routed experts of the turn's tokens, counted from its first one; None: there are none."""
        own = tokens_pb2.RoutedExperts()
        own.CopyFrom(routed)
        own.start -= self.prefix_length
        whole = len(self.packed_ids) // BYTES_PER_TOKEN - self.prefix_length
        own.num_tokens = min(routed.num_tokens, whole - own.start)
        if own.start < 0 or own.num_tokens < 1:
            return None
        size = len(routed.experts) // routed.num_tokens
        own.experts = routed.experts[: own.num_tokens * size]
        self._num_routed = max(self._num_routed, own.start + own.num_tokens)
        return own

    async def close(self) -> None:
        """End the turn in the store, unless its last tokens have done so."""
        if not self.is_closed:
            await self._append(tokens_pb2.PackedTokens())

    async def fail_rollout(self, message: str) -> None:
        """Finish the rollout with an INFRASTRUCTURE failure."""
        request = store_pb.RolloutFinish(
            run_id=self.begin.run_id,
            rollout_id=self.begin.rollout_id,
            credential_digest=self.begin.credential_digest,
        )
        request.failure.failure_class = tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE
        request.failure.message = message
        await self._recorder.finish(request)

    async def _append(
        self,
        new: tokens_pb2.PackedTokens,
        routed: tokens_pb2.RoutedExperts | None = None,
    ) -> None:
        """Record tokens; the last ones end the turn."""
        if self._unrecorded.token_ids:
            new = packed_tokens.joined(self._unrecorded, new)
        append = store_pb.TokenAppend(
            run_id=self.begin.run_id,
            rollout_id=self.begin.rollout_id,
            turn_id=self.begin.turn_id,
            epoch=self._epoch,
            offset=self._num_stored,
            tokens=new,
            routed_experts=routed,
        )
        if self.has_ended:
            append.finish_reason = self.finish_reason
            append.message_key = self.prompt.answer_key(self.answer.message)
            if self.drift is not None:
                append.drift.CopyFrom(self.drift)
        await self._recorder.record(append)
        self._num_stored += packed_tokens.num_tokens(new)
        self._unrecorded.Clear()
        self.is_closed = self.has_ended

    def _has_complete_answer(self) -> bool:
        """Whether the recorded tokens are an answer that has to end; more are then looked at."""
        end = self.answer_end
        return end is not None and end.num_until_end(self.sampled_ids) is not None

    def _finish_reason_of_tokens(self) -> tokens_pb2.FinishReason.ValueType:
        """The end of a turn whose last attempt died between its last token and its end."""
        sampling = self.begin.sampling
        stop_token_ids: Sequence[int] = sampling.stop_token_ids
        if not sampling.ignore_eos:
            stop_token_ids = [*stop_token_ids, *self.prompt.template.stop_token_ids]
        sampled_ids = self.sampled_ids
        if sampled_ids and sampled_ids[-1] in stop_token_ids:
            return tokens_pb2.FINISH_REASON_STOP
        if self._is_complete or self.stop_strings.ends_with_stop(sampled_ids):
            return tokens_pb2.FINISH_REASON_STOP
        if len(sampled_ids) >= sampling.max_new_tokens:
            return tokens_pb2.FINISH_REASON_LENGTH
        return tokens_pb2.FINISH_REASON_UNSPECIFIED
