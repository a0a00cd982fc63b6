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
from trajectory_manager.model.tokens import Append, Appended, RolloutFinish, TurnEnd
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
        parsed = self._parse(request.appends)
        valid = [append for append in parsed if isinstance(append, Append)]
        with self._inflight.reserve(sum(append.num_bytes for append in valid)):
            appended, finished = await self._execute(valid, request.finishes)
        response, stored = pb.AppendTokensResponse(), iter(appended)
        for append in parsed:
            result = next(stored) if isinstance(append, Append) else append
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
        self, appends: Sequence[Append], finishes: Sequence[pb.RolloutFinish]
    ) -> tuple[list[_Result], list[ServiceError | None]]:
        """Concurrently, to share the store's round trips, unless a rollout is in both."""
        if not finishes:
            return await self._rollouts.append(appends), []
        finishing = {(finish.run_id, finish.rollout_id) for finish in finishes}
        if any(append[:2] in finishing for append in appends):
            return await self._rollouts.append(appends), await self._finish(finishes)
        return await asyncio.gather(self._rollouts.append(appends), self._finish(finishes))

    def _parse(self, messages: Sequence[pb.TokenAppend]) -> list[Append | ServiceError]:
        """Valid appends; one that follows an invalid append of its turn would leave a gap."""
        invalid: dict[tuple[str, str, str], ServiceError] = {}
        parsed: list[Append | ServiceError] = []
        for message in messages:
            try:
                append = self._append_from(message)
            except ServiceError as error:
                invalid.setdefault((message.run_id, message.rollout_id, message.turn_id), error)
                parsed.append(error)
            else:
                parsed.append(invalid.get(append[:3], append) if invalid else append)
        return parsed

    def _append_from(self, message: pb.TokenAppend) -> Append:
        offset = fields.not_negative("offset", message.offset)
        append = Append(
            *validation.turn_name(message.run_id, message.rollout_id, message.turn_id),
            message.epoch,
            offset,
            conversion.packed_from("tokens", message.tokens),
            _turn_end_from(message),
            conversion.routed_experts_from(message),
        )
        end = offset + append.tokens.num_tokens
        if end > self._max_turn_tokens:
            cure = f"a turn that adds at most {self._max_turn_tokens} tokens (max_turn_tokens)"
            raise invalid_argument("offset", f"{offset}, ending at {end}", cure)
        if end == offset and append.end is None and append.routed is None:
            raise invalid_argument("tokens", "no token", "tokens, or a finish_reason")
        return append

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


def _turn_end_from(message: pb.TokenAppend) -> TurnEnd | None:
    if not message.finish_reason:
        if message.HasField("drift"):
            raise invalid_argument("drift", "given", "absent without a finish_reason")
        return None
    if message.finish_reason not in _END_REASONS:
        raise invalid_argument("finish_reason", message.finish_reason, "STOP, LENGTH or CANCELLED")
    return TurnEnd(
        reason=message.finish_reason,
        answer_key=validation.optional_name("message_key", message.message_key),
        drift=conversion.drift_from(message.drift) if message.HasField("drift") else "",
    )
