"""AppendSegments: many appends in one message, each accepted or refused by itself.

A message holds what many writers wait for. Its appends go to the store together, except that a
turn's second append waits for its first: what would leave a gap must not be tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.chassis import status
from services.chassis.errors import ServiceError, invalid_argument
from trajectory_manager import conversion, validation
from trajectory_manager.rollouts import Rollouts
from trajectory_manager.room import Room
from trajectory_manager.token_records import Append, Appended, Finish

TURN_ENDS = (
    tokens_pb2.FINISH_REASON_STOP,
    tokens_pb2.FINISH_REASON_LENGTH,
    tokens_pb2.FINISH_REASON_CANCELLED,
)
_MAX_APPENDS = 4096

_Result = Appended | ServiceError


class Appends:
    """Appends of all callers, as far as there is room for what waits for the store."""

    def __init__(self, rollouts: Rollouts, room: Room, max_turn_tokens: int) -> None:
        """`room` bounds all messages under way, `max_turn_tokens` a turn."""
        self._rollouts = rollouts
        self._room = room
        self._max_turn_tokens = max_turn_tokens

    async def append(self, request: pb.AppendSegmentsRequest) -> pb.AppendSegmentsResponse:
        """Do each append of `request`.

        Raises:
            ServiceError: RESOURCE_EXHAUSTED with a time, INVALID_ARGUMENT (too many appends).
        """
        if len(request.appends) > _MAX_APPENDS:
            raise invalid_argument("appends", len(request.appends), f"at most {_MAX_APPENDS}")
        with self._room.taken(request.ByteSize()):
            results = await self._results([self._converted(a) for a in request.appends])
            finished = await asyncio.gather(*(self._finished(f) for f in request.finishes))
        return pb.AppendSegmentsResponse(
            results=[_result_to(result) for result in results], finish_results=finished
        )

    async def _finished(self, message: pb.FinishRolloutRequest) -> pb.FinishResult:
        try:
            await self._rollouts.finish(*conversion.finish_from(message))
        except ServiceError as error:
            return pb.FinishResult(error=status.message(error))
        return pb.FinishResult()

    def _converted(self, message: pb.Append) -> Append | ServiceError:
        try:
            append = Append(
                run_id=validation.run_name(message.run_id),
                rollout_id=validation.name("rollout_id", message.rollout_id),
                turn_id=validation.name("turn_id", message.turn_id),
                epoch=message.epoch,
                offset=validation.not_negative("offset", message.offset),
                tokens=conversion.packed_from("tokens", message.tokens),
                finish=_finish_from(message),
            )
            self._check_length(message.offset, append)
        except ServiceError as error:
            return error
        return append

    def _check_length(self, offset: int, append: Append) -> None:
        end = offset + append.tokens.num_tokens
        if end > self._max_turn_tokens:
            cure = f"a turn that adds at most {self._max_turn_tokens} tokens (max_turn_tokens)"
            raise invalid_argument("offset", f"{offset}, ending at {end}", cure)
        if end == offset and append.finish is None:
            raise invalid_argument("tokens", "no token", "tokens, or a finish_reason")

    async def _results(self, appends: Sequence[Append | ServiceError]) -> list[_Result]:
        results: list[_Result | None] = [
            append if isinstance(append, ServiceError) else None for append in appends
        ]
        refused: dict[tuple[str, str, str], ServiceError] = {}
        while wave := _first_of_each_turn(appends, results, refused):
            answers = await self._rollouts.append([append for _, append in wave])
            for (index, append), answer in zip(wave, answers, strict=True):
                results[index] = answer
                if isinstance(answer, ServiceError):
                    refused[_turn(append)] = answer
        return [result for result in results if result is not None]


def _first_of_each_turn(
    appends: Sequence[Append | ServiceError],
    results: list[_Result | None],
    refused: dict[tuple[str, str, str], ServiceError],
) -> list[tuple[int, Append]]:
    """The next append of each turn with its index; those behind a refused one are refused too."""
    wave: dict[tuple[str, str, str], tuple[int, Append]] = {}
    for index, append in enumerate(appends):
        if results[index] is not None or isinstance(append, ServiceError):
            continue
        turn = _turn(append)
        if turn in refused:
            results[index] = refused[turn]
        else:
            wave.setdefault(turn, (index, append))
    return list(wave.values())


def _turn(append: Append) -> tuple[str, str, str]:
    return append.run_id, append.rollout_id, append.turn_id


def _finish_from(message: pb.Append) -> Finish | None:
    if not message.finish_reason:
        return None
    if message.finish_reason not in TURN_ENDS:
        raise invalid_argument("finish_reason", message.finish_reason, "STOP, LENGTH or CANCELLED")
    key = validation.optional_name("message_key", message.message_key)
    return Finish(reason=message.finish_reason, answer_key=key)


def _result_to(result: _Result) -> pb.AppendResult:
    if isinstance(result, ServiceError):
        return pb.AppendResult(error=status.message(result))
    return pb.AppendResult(num_tokens=result.num_tokens)
