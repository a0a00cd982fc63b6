"""BeginTurns: start rollouts and begin turns, many in one message.

A message holds the calls of many agents. Parts are executed concurrently and
succeed or fail independently; those that wait for the store share its round trips.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

import grpc
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.chassis import metrics
from services.chassis.errors import Reason, ServiceError, exhausted, invalid_argument
from services.chassis.log import get_logger
from services.chassis.rpc import status
from trajectory_manager.api import conversion, lease_token, validation
from trajectory_manager.model.records import Purpose, Rollout, SlotName
from trajectory_manager.service.rollouts import Rollouts

Part = TypeVar("Part", pb.NewRollout, pb.NewTurn)
Result = TypeVar("Result", pb.NewRolloutResult, pb.NewTurnResult)

_FAILED = metrics.counter(
    "trajectory_manager",
    "begin_turns_failures_total",
    "Parts of BeginTurns that failed, by part and reason.",
    ("part", "reason"),
)

_MAX_PARTS = 1024
_MAX_KEYS = 4096
_MAX_RESPONSE_BYTES = 8 << 20
"""The result of a prompt that continues a long rollout holds all of its tokens."""
_RETRY_SECONDS = 0.05


class BeginTurnsHandler:
    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    async def begin(self, request: pb.BeginTurnsRequest) -> pb.BeginTurnsResponse:
        """Start the rollouts and begin the turns of `request`.

        Raises:
            ServiceError: INVALID_ARGUMENT (too many parts).
        """
        validation.bounded("rollouts", len(request.rollouts), _MAX_PARTS)
        validation.bounded("turns", len(request.turns), _MAX_PARTS)
        rollouts, turns = await asyncio.gather(
            _each(self._start_rollout, request.rollouts, pb.NewRolloutResult),
            _each(self._begin_turn, request.turns, pb.NewTurnResult),
        )
        return pb.BeginTurnsResponse(rollouts=rollouts, turns=_that_fit(turns))

    async def _start_rollout(self, new: pb.NewRollout) -> pb.NewRolloutResult:
        rollout = Rollout(
            run_id=validation.run_name(new.run_id),
            rollout_id=validation.name("rollout_id", new.rollout_id),
            purpose=conversion.purpose_from("purpose", new.purpose),
            credential_digest=validation.digest("credential_digest", new.credential_digest),
            pinned_weight_version=conversion.pinned_from("pinned_weight_version", new),
            traceparent=validation.text("traceparent", new.traceparent),
            labels=validation.labels("labels", new.labels),
        )
        group_id = await self._rollouts.start(rollout, _nonce(new))
        return pb.NewRolloutResult(started=pb.StartedRollout(group_id=group_id))

    async def _begin_turn(self, new: pb.NewTurn) -> pb.NewTurnResult:
        validation.turn_name(new.run_id, new.rollout_id, new.turn_id)
        validation.digest("credential_digest", new.credential_digest)
        validation.name("attempt_id", new.attempt_id)
        validation.optional_name("parent_turn_id", new.parent_turn_id)
        validation.text("template_fingerprint", new.template_fingerprint)
        _check_prompt(new)
        return pb.NewTurnResult(begun=await self._rollouts.begin_turn(new))


async def _each(
    handle: Callable[[Part], Awaitable[Result]], parts: Iterable[Part], failed: type[Result]
) -> list[Result]:
    """The result of each part, made by `failed` where there is an error."""

    async def result(part: Part) -> Result:
        try:
            return await handle(part)
        except ServiceError as error:
            reported = error
        except Exception as error:
            # A bug in one part must not fail the others.
            reported = _internal_error(part, error)
        _FAILED.labels(type(part).__name__, reported.reason).inc()
        return failed(error=status.message(reported))

    return await asyncio.gather(*map(result, parts))


def _internal_error(part: pb.NewRollout | pb.NewTurn, error: Exception) -> ServiceError:
    names = {"run_id": part.run_id, "rollout_id": part.rollout_id}
    get_logger().error("begin_turns_failed", exc_info=error, **names)
    message = f"internal error: see the logs of rollout {part.rollout_id}"
    return ServiceError(grpc.StatusCode.INTERNAL, Reason.INTERNAL, message)


def _that_fit(results: Iterable[pb.NewTurnResult]) -> Iterator[pb.NewTurnResult]:
    """One result of any size, and others while the message stays within bounds."""
    size = 0
    for result in results:
        added = 0 if result.HasField("error") else result.ByteSize()
        if size and added and size + added > _MAX_RESPONSE_BYTES:
            # The turn has begun: the same attempt gets the same result again.
            message = f"the prefixes of this message's turns exceed {_MAX_RESPONSE_BYTES} bytes"
            error = exhausted(Reason.TOO_MANY_REQUESTS, f"{message}: retry", _RETRY_SECONDS)
            yield pb.NewTurnResult(error=status.message(error))
            continue
        size += added
        yield result


def _nonce(new: pb.NewRollout) -> str | None:
    """The nonce in the lease token; None without a lease, which only EVAL may lack."""
    if new.lease_token:
        rollout_id, nonce = lease_token.parse(new.lease_token)
        if rollout_id != new.rollout_id:
            raise invalid_argument("rollout_id", new.rollout_id, f"{rollout_id}, as leased")
        return nonce
    if new.purpose != int(Purpose.EVAL):
        raise invalid_argument("lease_token", "", "a lease from LeaseTasks, or purpose EVAL")
    if SlotName.parse(new.rollout_id) is not None:
        cure = "a name that does not end like a leased one (/slot/attempt)"
        raise invalid_argument("rollout_id", new.rollout_id, cure)
    return None


def _check_prompt(new: pb.NewTurn) -> None:
    kind = new.WhichOneof("prompt")
    if kind == "token_ids":
        validation.ids("token_ids", new.token_ids)
        if not new.token_ids:
            raise invalid_argument("token_ids", "empty", "at least one id")
        return
    if kind != "message_keys":
        raise invalid_argument("prompt", "absent", "token_ids or message_keys")
    keys = new.message_keys.keys
    if not 1 <= len(keys) <= _MAX_KEYS:
        raise invalid_argument("message_keys.keys", f"{len(keys)} keys", f"1 to {_MAX_KEYS}")
    for key in keys:
        validation.message_key("message_keys.keys", key)
