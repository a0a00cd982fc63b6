"""AppendSegments: many appends in one message, each accepted or refused by itself.

A message holds what many writers wait for; the store does all of it in one step.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.chassis.errors import ServiceError, invalid_argument
from services.chassis.rpc import status
from trajectory_manager.api import conversion, validation
from trajectory_manager.api.inflight_bytes import InflightBytes
from trajectory_manager.model.tokens import Append, Appended, RolloutFinish, TurnEnd
from trajectory_manager.service.rollouts import Rollouts

END_REASONS = (
    tokens_pb2.FINISH_REASON_STOP,
    tokens_pb2.FINISH_REASON_LENGTH,
    tokens_pb2.FINISH_REASON_CANCELLED,
)
_MAX_PARTS = 1024

_Result = Appended | ServiceError


class AppendTokensHandler:
    """Appends of all callers, as far as there is room for what waits for the store."""

    def __init__(self, rollouts: Rollouts, inflight: InflightBytes, max_turn_tokens: int) -> None:
        """`inflight` bounds the tokens of all messages under way, `max_turn_tokens` a turn."""
        self._rollouts = rollouts
        self._inflight = inflight
        self._max_turn_tokens = max_turn_tokens

    async def append(self, request: pb.AppendSegmentsRequest) -> pb.AppendSegmentsResponse:
        """Do each append of `request`, then close the rollouts it names.

        Raises:
            ServiceError: RESOURCE_EXHAUSTED with a time, INVALID_ARGUMENT (too many parts).
        """
        validation.bounded("appends", len(request.appends), _MAX_PARTS)
        validation.bounded("finishes", len(request.finishes), _MAX_PARTS)
        response = pb.AppendSegmentsResponse()
        appended, finished = await self._done(request)
        for result in appended:
            if isinstance(result, ServiceError):
                response.results.add(error=status.message(result))
            else:
                response.results.add(num_tokens=result.num_tokens)
        for refused in finished:
            error = None if refused is None else status.message(refused)
            response.finish_results.add(error=error)
        return response

    async def _done(
        self, request: pb.AppendSegmentsRequest
    ) -> tuple[list[_Result], list[ServiceError | None]]:
        """Appends, then ends: together, so that they share steps, unless a rollout is in both."""
        appends: list[Append | _Result] = [self._converted(message) for message in request.appends]
        _refuse_successors(request.appends, appends)
        sound = [append for append in appends if isinstance(append, Append)]
        growing = {append[:2] for append in sound}
        ending = {(finish.run_id, finish.rollout_id) for finish in request.finishes}
        with self._inflight.reserve(sum(append.tokens.num_bytes for append in sound)):
            if growing & ending or not ending:
                return await self._appended(appends), await self._finished(request.finishes)
            return await asyncio.gather(self._appended(appends), self._finished(request.finishes))

    async def _appended(self, results: Sequence[Append | _Result]) -> list[_Result]:
        sound = [result for result in results if isinstance(result, Append)]
        answers = iter(await self._rollouts.append(sound))
        return [next(answers) if isinstance(result, Append) else result for result in results]

    def _converted(self, message: pb.Append) -> Append | ServiceError:
        try:
            offset = validation.not_negative("offset", message.offset)
            append = Append(
                *validation.turn_name(message.run_id, message.rollout_id, message.turn_id),
                message.epoch,
                offset,
                conversion.packed_from("tokens", message.tokens),
                _turn_end_from(message),
            )
            self._check_length(offset, append)
        except ServiceError as error:
            return error
        return append

    def _check_length(self, offset: int, append: Append) -> None:
        end = offset + append.tokens.num_tokens
        if end > self._max_turn_tokens:
            cure = f"a turn that adds at most {self._max_turn_tokens} tokens (max_turn_tokens)"
            raise invalid_argument("offset", f"{offset}, ending at {end}", cure)
        if end == offset and append.end is None:
            raise invalid_argument("tokens", "no token", "tokens, or a finish_reason")

    async def _finished(
        self, messages: Sequence[pb.FinishRolloutRequest]
    ) -> list[ServiceError | None]:
        answers: list[ServiceError | None] = [None] * len(messages)
        by_run: defaultdict[str, dict[int, RolloutFinish]] = defaultdict(dict)
        for index, message in enumerate(messages):
            try:
                run_id, finish = conversion.rollout_finish_from(message)
            except ServiceError as error:
                answers[index] = error
            else:
                by_run[run_id][index] = finish
        for run_id, finishes in by_run.items():
            refused = await self._closed(run_id, list(finishes.values()))
            for index, answer in zip(finishes, refused, strict=True):
                answers[index] = answer
        return answers

    async def _closed(
        self, run_id: str, finishes: list[RolloutFinish]
    ) -> Sequence[ServiceError | None]:
        try:
            return await self._rollouts.finish(run_id, finishes)
        except ServiceError as error:
            return [error] * len(finishes)


def _refuse_successors(messages: Sequence[pb.Append], results: list[Append | _Result]) -> None:
    """What follows an unsound append of its turn would leave a gap, and is refused with it."""
    if all(isinstance(result, Append) for result in results):
        return
    refused: dict[tuple[str, str, str], ServiceError] = {}
    for index, message in enumerate(messages):
        turn = (message.run_id, message.rollout_id, message.turn_id)
        results[index] = result = refused.get(turn, results[index])
        if isinstance(result, ServiceError):
            refused[turn] = result


def _turn_end_from(message: pb.Append) -> TurnEnd | None:
    if not message.finish_reason:
        return None
    if message.finish_reason not in END_REASONS:
        raise invalid_argument("finish_reason", message.finish_reason, "STOP, LENGTH or CANCELLED")
    key = validation.optional_name("message_key", message.message_key)
    return TurnEnd(reason=message.finish_reason, answer_key=key)
