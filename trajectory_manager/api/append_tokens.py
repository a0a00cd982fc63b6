"""AppendTokens: append to many turns and finish rollouts, in one message.

A message holds the appends of many writers; the store executes all of them in one atomic step per
server. Appends succeed or fail independently.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.chassis.errors import ServiceError, invalid_argument
from services.chassis.rpc import fields, status
from services.chassis.rpc.request_budget import RequestBudget
from trajectory_manager.api import conversion, validation
from trajectory_manager.model.tokens import BYTES_PER_TOKEN, Appended, RolloutFinish
from trajectory_manager.service.rollouts import Rollouts

_END_REASONS = (
    tokens_pb2.FINISH_REASON_STOP,
    tokens_pb2.FINISH_REASON_LENGTH,
    tokens_pb2.FINISH_REASON_CANCELLED,
)
_MAX_PARTS = 1024

_Result = Appended | ServiceError


class AppendTokensHandler:
    """Appends tokens and finishes rollouts, within the bound on bytes in flight."""

    def __init__(self, rollouts: Rollouts, inflight: RequestBudget, max_turn_tokens: int) -> None:
        """`inflight` bounds the tokens of all messages in flight, `max_turn_tokens` a turn."""
        self._rollouts = rollouts
        self._inflight = inflight
        self._max_turn_tokens = max_turn_tokens

    async def append(self, request: pb.AppendTokensRequest) -> pb.AppendTokensResponse:
        """Execute the appends of `request`, then finish its rollouts.

        Raises:
            ServiceError: RESOURCE_EXHAUSTED with a retry time, INVALID_ARGUMENT (too many parts).
        """
        validation.bounded("appends", len(request.appends), _MAX_PARTS)
        validation.bounded("finishes", len(request.finishes), _MAX_PARTS)
        checked = self._checked(request.appends)
        valid = [each for each in checked if not isinstance(each, ServiceError)]
        with self._inflight.reserve(sum(map(_num_bytes, valid))):
            appended, finished = await self._execute(valid, request.finishes)
        response, stored = pb.AppendTokensResponse(), iter(appended)
        for each in checked:
            result = each if isinstance(each, ServiceError) else next(stored)
            if isinstance(result, ServiceError):
                response.results.add(error=status.message(result))
            else:
                response.results.add().appended.num_tokens = result.num_tokens
        for error in finished:
            if error is None:
                response.finish_results.add().finished.SetInParent()
            else:
                response.finish_results.add(error=status.message(error))
        return response

    async def _execute(
        self, appends: Sequence[pb.TokenAppend], finishes: Sequence[pb.RolloutFinish]
    ) -> tuple[list[_Result], list[ServiceError | None]]:
        """Concurrently, to share the store's round trips, unless a rollout is in both."""
        if not finishes:
            return await self._rollouts.append(appends), []
        finishing = {(finish.run_id, finish.rollout_id) for finish in finishes}
        if any((each.run_id, each.rollout_id) in finishing for each in appends):
            return await self._rollouts.append(appends), await self._finish(finishes)
        return await asyncio.gather(self._rollouts.append(appends), self._finish(finishes))

    def _checked(self, messages: Sequence[pb.TokenAppend]) -> list[pb.TokenAppend | ServiceError]:
        """Valid appends; one that follows an invalid append of its turn would leave a gap."""
        invalid: dict[tuple[str, str, str], ServiceError] = {}
        checked: list[pb.TokenAppend | ServiceError] = []
        for message in messages:
            turn = (message.run_id, message.rollout_id, message.turn_id)
            try:
                self._check(message)
            except ServiceError as error:
                invalid.setdefault(turn, error)
                checked.append(error)
            else:
                checked.append(invalid.get(turn, message) if invalid else message)
        return checked

    def _check(self, append: pb.TokenAppend) -> None:
        offset = fields.not_negative("offset", append.offset)
        validation.turn_name(append.run_id, append.rollout_id, append.turn_id)
        validation.packed_tokens("tokens", append.tokens)
        end = offset + len(append.tokens.token_ids) // BYTES_PER_TOKEN
        _check_end(append)
        is_routed = append.HasField("routed_experts")
        if is_routed:
            _check_routed(append.routed_experts, end)
        if end > self._max_turn_tokens:
            cure = f"a turn that adds at most {self._max_turn_tokens} tokens (max_turn_tokens)"
            raise invalid_argument("offset", f"{offset}, ending at {end}", cure)
        if end == offset and not append.finish_reason and not is_routed:
            raise invalid_argument("tokens", "no token", "tokens, or a finish_reason")

    async def _finish(self, messages: Sequence[pb.RolloutFinish]) -> list[ServiceError | None]:
        results: list[ServiceError | None] = [None] * len(messages)
        by_run: defaultdict[str, dict[int, RolloutFinish]] = defaultdict(dict)
        for index, message in enumerate(messages):
            try:
                run_id, finish = conversion.rollout_finish_from(message)
            except ServiceError as error:
                results[index] = error
            else:
                by_run[run_id][index] = finish
        for run_id, finishes in by_run.items():
            try:
                errors = await self._rollouts.finish(run_id, list(finishes.values()))
            except ServiceError as error:
                errors = [error] * len(finishes)
            for index, failure in zip(finishes, errors, strict=True):
                results[index] = failure
        return results


def _num_bytes(append: pb.TokenAppend) -> int:
    tokens = append.tokens
    return len(tokens.token_ids) + len(tokens.logprobs) + len(append.routed_experts.experts)


def _check_end(append: pb.TokenAppend) -> None:
    if not append.finish_reason:
        if append.HasField("drift"):
            raise invalid_argument("drift", "given", "absent without a finish_reason")
        return
    if append.finish_reason not in _END_REASONS:
        raise invalid_argument("finish_reason", append.finish_reason, "STOP, LENGTH or CANCELLED")
    validation.optional_name("message_key", append.message_key)
    fields.not_negative("drift.position", append.drift.position)
    validation.text("drift.recorded_text", append.drift.recorded_text)
    validation.text("drift.retokenized_text", append.drift.retokenized_text)


def _check_routed(given: tokens_pb2.RoutedExperts, end: int) -> None:
    """Routed experts are of tokens before `end`, and as many as their sizes say."""
    if given.start < 0 or given.num_tokens < 1 or given.start + given.num_tokens > end:
        window = f"[{given.start}, {given.start + given.num_tokens})"
        raise invalid_argument(
            "routed_experts", window, f"at least one token before {end}, the turn's end"
        )
    ids = given.num_tokens * given.num_layers * given.num_chosen
    if ids < 1 or len(given.experts) not in (ids, 2 * ids):
        size = f"{given.num_tokens} tokens, {given.num_layers} layers, {given.num_chosen} choices"
        cure = f"one byte or two for each of {size}, all at least 1"
        raise invalid_argument("routed_experts.experts", f"{len(given.experts)} bytes", cure)
