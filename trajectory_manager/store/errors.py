"""The errors of a store by name, for the Lua scripts and every other implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from services.chassis.errors import (
    Reason,
    ServiceError,
    already_exists,
    exhausted,
    failed_precondition,
    invalid_argument,
    not_found,
    permission_denied,
    shortened,
    stale_epoch,
)
from services.lib.bounds import MIN_TEMPERATURE
from trajectory_manager.model.records import RolloutState


def cold_training(field: str, temperature: float) -> ServiceError:
    """INVALID_ARGUMENT: tokens sampled greedily, or nearly, have no log-probs to train with."""
    cure = f"at least {MIN_TEMPERATURE:g} in a TRAIN rollout; only EVAL may be greedy"
    return invalid_argument(field, temperature, cure)


def finished_rollout(rollout_id: str, state: str) -> ServiceError:
    message = f"rollout {rollout_id!r} has finished ({state})"
    return failed_precondition(Reason.ROLLOUT_FINISHED, message)


def _unknown_run(run_id: str) -> ServiceError:
    message = (
        f"run {run_id!r} does not exist: create it with RunService.CreateRun first; if it existed, "
        "the store has lost it"
    )
    metadata = {"what": "run", "name": run_id}
    return ServiceError(grpc.StatusCode.NOT_FOUND, Reason.NOT_FOUND, message, metadata=metadata)


def _other_turn(turn_id: str, differs: str) -> ServiceError:
    message = (
        f"turn {turn_id!r} already exists with another {differs}: repeat it unchanged, or begin a "
        "turn with another turn_id"
    )
    metadata = {"what": "turn", "name": turn_id, "differs": differs}
    code = grpc.StatusCode.ALREADY_EXISTS
    return ServiceError(code, Reason.ALREADY_EXISTS, message, metadata=metadata)


_PRECONDITIONS: dict[str, tuple[Reason, str]] = {
    "GAP": (
        Reason.OFFSET_GAP,
        "offset {1} of turn {0!r} leaves a gap: {2} tokens are stored; the rollout failed as "
        "INFRASTRUCTURE",
    ),
    "ENDED_TURN": (Reason.TURN_FINISHED, "turn {0!r} has ended"),
    "LOST_LEASE": (
        Reason.LEASE_EXPIRED,
        "the lease of rollout {0!r} has ended: its sample was replaced, or its group does not need "
        "it any more; lease a new task",
    ),
    "LOST_COLUMN": (
        Reason.LEASE_EXPIRED,
        "column {0!r} of sample {1!r} is not leased to this caller any more: drop the values and "
        "lease again",
    ),
    "STEP_ORDER": (
        Reason.STEP_OUT_OF_ORDER,
        "step {0} is out of order: the next one to lease is {1}",
    ),
    "OPEN_STEP": (
        Reason.STEP_OUT_OF_ORDER,
        "step {0}: step {1} is open, it was leased with `streaming`: lease it until it is "
        "complete, or once without streaming",
    ),
    "FULL_GROUP": (Reason.GROUP_FULL, "group {0!r} is full: {1}; go on with another task_id"),
    "RUNNING_RUN": (
        Reason.WRONG_STATE,
        "run {0!r} has not ended: call RunService.EndRun first",
    ),
    "DELETED_RUN": (
        Reason.WRONG_STATE,
        "run {0!r} is being deleted: repeat RunService.DeleteRun until it succeeds",
    ),
}
"""FAILED_PRECONDITION by name: reason, and message with the facts."""
_EXHAUSTED: dict[str, tuple[Reason, float, str]] = {
    "FULL_QUEUE": (Reason.TOO_MANY_REQUESTS, 1.0, "the queue takes {1} more tasks, not {0}"),
    "CLOSED_ADMISSION": (
        Reason.TOO_MANY_REQUESTS,
        1.0,
        "admission takes {1} more groups, not {0}: it opens when the trainer leases a step, and "
        "when it waits for the next one",
    ),
    "FULL_RUN": (
        Reason.STORE_FULL,
        5.0,
        "run {0!r} stores {1} tokens, more than its max_stored_tokens, {2}: no group starts until "
        "some are deleted (by retention_steps or DeleteTrajectories)",
    ),
}
"""RESOURCE_EXHAUSTED by name: reason, seconds until a retry, and message with the facts."""
_EXISTING = {
    "OTHER_ROLLOUT": ("rollout", "{0}"),
    "OTHER_TOKENS": ("token of turn", "{0}[{1}]"),
    "OTHER_END": ("end of turn", "{0}"),
    "OTHER_TASK": ("task", "{0}"),
    "OTHER_COLUMN": ("column {0!r} of", "{1}"),
}
"""ALREADY_EXISTS by name: what, and which."""
_OTHERS: dict[str, Callable[..., ServiceError]] = {
    "UNKNOWN_RUN": _unknown_run,
    "UNKNOWN_ROLLOUT": lambda name: not_found("rollout", name),
    "UNKNOWN_TURN": lambda name: not_found("turn", name),
    "UNKNOWN_STEP": lambda name: not_found("lease of step", name),
    "BAD_CREDENTIAL": lambda name: permission_denied(f"not the credential of rollout {name!r}"),
    "STALE_TURN": lambda name, given, current: stale_epoch(f"turn {name!r}", given, current),
    "STALE_TRAINER": lambda name, given, now: stale_epoch(f"trainer of run {name!r}", given, now),
    "OTHER_TURN": _other_turn,
    "FINISHED_ROLLOUT": lambda name, state: finished_rollout(name, RolloutState(int(state)).name),
    "TOO_MANY_GROUPS": lambda given, bound: invalid_argument(
        "num_groups",
        int(given),
        f"at most {bound}: groups_per_step * (max_staleness + 1), and fifo_window if there is one",
    ),
    "MINIMUM_ABOVE": lambda given, most: invalid_argument(
        "min_groups", int(given), f"at most {most}, the groups that the step requests"
    ),
}


def store_error(name: str, *facts: object) -> ServiceError:
    """The error that Lua scripts call `name`, with its facts."""
    shown = [shortened(str(fact)) for fact in facts]
    if name in _PRECONDITIONS:
        reason, message = _PRECONDITIONS[name]
        return failed_precondition(reason, message.format(*shown))
    if name in _EXHAUSTED:
        reason, seconds, message = _EXHAUSTED[name]
        return exhausted(reason, message.format(*shown), seconds)
    if name in _EXISTING:
        return already_exists(*(part.format(*shown) for part in _EXISTING[name]))
    return _OTHERS[name](*shown)


def unwrap(reply: list[Any] | ServiceError) -> list[Any]:
    """What a Lua script returned after "ok".

    Raises:
        ServiceError: the reply, or what stands for "error" with a name and facts.
    """
    if isinstance(reply, ServiceError):
        raise reply
    if reply[0] == b"error":
        raise reply_error(reply)
    return reply[1:]


def reply_error(reply: list[Any]) -> ServiceError:
    return store_error(*(fact.decode() for fact in reply[1:]))
