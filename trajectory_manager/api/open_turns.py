"""Rollouts and turns that are opened, one by one or many in a message.

A message holds what many callers wait for: each part is opened or refused by itself, beside the
others, so that those that wait for the store share its round trips.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import grpc
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.chassis import metrics
from services.chassis.errors import Reason, ServiceError, exhausted, invalid_argument
from services.chassis.log import get_logger
from services.chassis.rpc import status
from trajectory_manager.api import conversion, lease_token, validation
from trajectory_manager.model.records import Purpose, Rollout, SlotName
from trajectory_manager.model.token_bytes import unpack_ids
from trajectory_manager.model.tokens import TurnBegin
from trajectory_manager.service.prefix_match import Divergence, Prompt
from trajectory_manager.service.rollouts import Rollouts

__all__ = ["BeginTurnsHandler"]

Request = TypeVar("Request", pb.StartRolloutRequest, pb.BeginTurnRequest)
Response = TypeVar("Response")

_ERROR = metrics.counter(
    "trajectory_manager",
    "refused_openings_total",
    "Parts of OpenTurns that were refused, by method and reason.",
    ("method", "reason"),
)

_MAX_PARTS = 1024
_MAX_ANSWER_BYTES = 8 << 20
"""A prompt that continues a long rollout is answered with all of its tokens."""
_RETRY_SECONDS = 0.05


class BeginTurnsHandler:
    """Opens rollouts and turns for whoever asks."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    async def open(self, request: pb.OpenTurnsRequest) -> pb.OpenTurnsResponse:
        """Open all parts of `request`.

        Raises:
            ServiceError: INVALID_ARGUMENT (too many parts).
        """
        validation.bounded("starts", len(request.starts), _MAX_PARTS)
        validation.bounded("begins", len(request.begins), _MAX_PARTS)
        starts, begins = await asyncio.gather(
            _each(self.start, request.starts), _each(self.begin, request.begins)
        )
        answer = pb.OpenTurnsResponse()
        for start in starts:
            if isinstance(start, ServiceError):
                answer.starts.add(error=status.message(start))
            else:
                answer.starts.add(response=start)
        for begin in _that_fit(begins):
            if isinstance(begin, ServiceError):
                answer.begins.add(error=status.message(begin))
            else:
                answer.begins.add(response=begin)
        return answer

    async def start(self, request: pb.StartRolloutRequest) -> pb.StartRolloutResponse:
        """Open a rollout. Raises `ServiceError`."""
        rollout = Rollout(
            run_id=validation.run_name(request.run_id),
            rollout_id=validation.name("rollout_id", request.rollout_id),
            purpose=conversion.purpose_from("purpose", request.purpose),
            credential_digest=validation.digest("credential_digest", request.credential_digest),
            pinned_weight_version=_pinned(request),
            traceparent=validation.text("traceparent", request.traceparent),
        )
        group_id = await self._rollouts.start(rollout, _nonce(request))
        return pb.StartRolloutResponse(group_id=group_id)

    async def begin(self, request: pb.BeginTurnRequest) -> pb.BeginTurnResponse:
        """Open a turn, or take it over. Raises `ServiceError`."""
        opened = await self._rollouts.begin_turn(
            validation.run_name(request.run_id),
            validation.name("rollout_id", request.rollout_id),
            validation.digest("credential_digest", request.credential_digest),
            TurnBegin(
                turn_id=validation.name("turn_id", request.turn_id),
                attempt_id=validation.name("attempt_id", request.attempt_id),
                prompt_digest="",
                parent_turn_id=validation.optional_name("parent_turn_id", request.parent_turn_id),
                template_fingerprint=validation.text(
                    "template_fingerprint", request.template_fingerprint
                ),
                temperature=validation.finite("temperature", request.temperature),
            ),
            _prompt(request),
        )
        begin = opened.turn.begin
        return pb.BeginTurnResponse(
            epoch=opened.turn.epoch,
            parent_turn_id=begin.parent_turn_id,
            prefix_token_ids=unpack_ids(opened.prefix_ids),
            num_matched_messages=begin.num_matched_messages,
            tokens=conversion.tokens_to(opened.tokens),
            finish_reason=opened.turn.finish_reason,  # type: ignore[arg-type]
            pinned_weight_version=opened.rollout.pinned_weight_version,
            divergence=_divergence_to(opened.divergence),
            required_weight_version=opened.rollout.required_weight_version,
        )


async def _each(
    opened: Callable[[Request], Awaitable[Response]], requests: Iterable[Request]
) -> list[Response | ServiceError]:
    return await asyncio.gather(*(_guarded(opened, request) for request in requests))


async def _guarded(
    opened: Callable[[Request], Awaitable[Response]], request: Request
) -> Response | ServiceError:
    """What one part is answered; a bug that it meets is nobody else's failure."""
    try:
        return await opened(request)
    except ServiceError as error:
        answer = error
    except Exception as error:
        names = {"run_id": request.run_id, "rollout_id": request.rollout_id}
        get_logger().error("begin_failed", exc_info=error, **names)
        message = f"internal error; the logs of rollout {request.rollout_id} say more"
        answer = ServiceError(grpc.StatusCode.INTERNAL, Reason.INTERNAL, message)
    _ERROR.labels(type(request).__name__.removesuffix("Request"), answer.reason.value).inc()
    return answer


def _that_fit(
    begins: Iterable[pb.BeginTurnResponse | ServiceError],
) -> Iterable[pb.BeginTurnResponse | ServiceError]:
    """One answer however large, and others while the message stays within bounds."""
    size = 0
    for begin in begins:
        if isinstance(begin, ServiceError):
            yield begin
            continue
        size += begin.ByteSize()
        if size == begin.ByteSize() or size <= _MAX_ANSWER_BYTES:
            yield begin
        else:
            # The turn is open: asked again by the same attempt, it is answered the same.
            size -= begin.ByteSize()
            message = f"the prefixes of this message's turns are over {_MAX_ANSWER_BYTES} bytes"
            yield exhausted(Reason.TOO_MANY_REQUESTS, f"{message}: ask again", _RETRY_SECONDS)


def _pinned(request: pb.StartRolloutRequest) -> int | None:
    if not request.HasField("pinned_weight_version"):
        return None
    if request.purpose != int(Purpose.EVAL):
        version = request.pinned_weight_version
        raise invalid_argument("pinned_weight_version", version, "only for purpose EVAL")
    return validation.not_negative("pinned_weight_version", request.pinned_weight_version)


def _nonce(request: pb.StartRolloutRequest) -> str | None:
    """The proof in the request's lease token; None without a lease, which only EVAL may lack."""
    if request.lease_token:
        rollout_id, nonce = lease_token.parse(request.lease_token)
        if rollout_id != request.rollout_id:
            raise invalid_argument("rollout_id", request.rollout_id, f"{rollout_id}, as leased")
        return nonce
    if request.purpose != int(Purpose.EVAL):
        raise invalid_argument("lease_token", "", "a lease from LeaseTask, or purpose EVAL")
    if SlotName.parse(request.rollout_id) is not None:
        cure = "a name that does not end like a leased one (/slot/attempt)"
        raise invalid_argument("rollout_id", request.rollout_id, cure)
    return None


def _prompt(request: pb.BeginTurnRequest) -> Prompt:
    if bool(request.token_ids) == bool(request.message_keys):
        given = "both" if request.token_ids else "neither"
        raise invalid_argument("token_ids, message_keys", given, "exactly one of them")
    keys = tuple(validation.name("message_keys", key) for key in request.message_keys)
    return Prompt(token_ids=request.token_ids, message_keys=keys)


def _divergence_to(divergence: Divergence | None) -> pb.Divergence | None:
    if divergence is None:
        return None
    return pb.Divergence(
        turn_id=divergence.turn_id,
        position=divergence.position,
        token_ids=unpack_ids(divergence.ids),
    )
