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

_QUEUE_RETRY_SECONDS = 1.0
_CAP_RETRY_SECONDS = 5.0


def unknown_run(run_id: str) -> ServiceError:
    """NOT_FOUND for a run that was never created."""
    message = f"run {run_id!r} does not exist: create it with RunService.CreateRun first"
    metadata = {"what": "run", "name": run_id}
    return ServiceError(grpc.StatusCode.NOT_FOUND, Reason.NOT_FOUND, message, metadata=metadata)


def gap(turn_id: str, offset: str, stored: str) -> ServiceError:
    """FAILED_PRECONDITION: tokens before the offset are missing, so the rollout has failed."""
    return failed_precondition(
        Reason.OFFSET_GAP,
        f"offset {offset} of turn {turn_id!r} leaves a gap: {stored} tokens are stored; "
        "the rollout failed as INFRASTRUCTURE",
    )


def finished_rollout(rollout_id: str, state: str) -> ServiceError:
    """FAILED_PRECONDITION: the rollout has finished."""
    message = f"rollout {rollout_id!r} has finished ({state})"
    return failed_precondition(Reason.ROLLOUT_FINISHED, message)


def ended_turn(turn_id: str) -> ServiceError:
    """FAILED_PRECONDITION: the turn has ended."""
    return failed_precondition(Reason.TURN_FINISHED, f"turn {turn_id!r} has ended")


def lost_lease(rollout_id: str) -> ServiceError:
    """FAILED_PRECONDITION: the lease expired, is surplus or never existed."""
    message = (
        f"the lease of rollout {rollout_id!r} has ended: its sample was replaced, or its group "
        "does not need it any more; lease a new task"
    )
    return failed_precondition(Reason.LEASE_EXPIRED, message)


def lost_column(column: str, sample_id: str) -> ServiceError:
    """FAILED_PRECONDITION: the cell is not leased, or to another caller."""
    message = (
        f"column {column!r} of sample {sample_id!r} is not leased to this caller any more: drop "
        "the values and lease again"
    )
    return failed_precondition(Reason.LEASE_EXPIRED, message)


def full_queue(num_new: str, num_free: str) -> ServiceError:
    """RESOURCE_EXHAUSTED: the task queue is bounded."""
    message = f"the queue takes {num_free} more tasks, not {num_new}"
    return exhausted(Reason.TOO_MANY_REQUESTS, message, _QUEUE_RETRY_SECONDS)


def full_run(run_id: str, num_stored: str, cap: str) -> ServiceError:
    """RESOURCE_EXHAUSTED: only max_stored_tokens keeps queued tasks out."""
    message = (
        f"run {run_id!r} stores {num_stored} tokens, more than its max_stored_tokens, {cap}: no "
        "group starts until some are deleted (by retention_steps or DeleteTrajectories)"
    )
    return exhausted(Reason.STORE_FULL, message, _CAP_RETRY_SECONDS)


def closed_admission(num_new: str, num_free: str) -> ServiceError:
    """RESOURCE_EXHAUSTED: as many groups are outstanding as max_staleness allows."""
    message = (
        f"admission takes {num_free} more groups, not {num_new}: it opens when the trainer leases "
        "a step, and when it waits for the next one"
    )
    return exhausted(Reason.TOO_MANY_REQUESTS, message, _QUEUE_RETRY_SECONDS)


def step_order(step: str, expected: str) -> ServiceError:
    """FAILED_PRECONDITION: steps are leased one after the other."""
    message = f"step {step} is out of order: the next one to lease is {expected}"
    return failed_precondition(Reason.STEP_OUT_OF_ORDER, message)


def open_step(step: str, still_open: str) -> ServiceError:
    """FAILED_PRECONDITION: an open step can neither be skipped nor committed."""
    message = (
        f"step {step}: step {still_open} is open, it was leased with `streaming`: lease it until "
        "it is complete, or once without streaming"
    )
    return failed_precondition(Reason.STEP_OUT_OF_ORDER, message)


def too_many_groups(num_groups: str, bound: str) -> ServiceError:
    """INVALID_ARGUMENT: admission never lets that many groups wait."""
    cure = (
        f"at most {bound}: groups_per_step * (max_staleness + 1), and fifo_window if there is one"
    )
    return invalid_argument("num_groups", int(num_groups), cure)


def minimum_above(min_groups: str, num_groups: str) -> ServiceError:
    """INVALID_ARGUMENT: min_groups exceeds num_groups."""
    cure = f"at most {num_groups}, the groups that the step requests"
    return invalid_argument("min_groups", int(min_groups), cure)


def pinned_training(version: int) -> ServiceError:
    """INVALID_ARGUMENT: only EVAL rollouts may pin a weight version."""
    cure = "absent: the leased task is for TRAIN, only EVAL is pinned"
    return invalid_argument("pinned_weight_version", version, cure)


def cold_training(field: str, temperature: float) -> ServiceError:
    """INVALID_ARGUMENT: tokens sampled greedily, or nearly, have no log-probs to train with."""
    cure = f"at least {MIN_TEMPERATURE:g} in a TRAIN rollout; only EVAL may be greedy"
    return invalid_argument(field, temperature, cure)


def other_turn(turn_id: str, differs: str) -> ServiceError:
    """ALREADY_EXISTS: the turn was begun with another prompt, sampling or template."""
    message = (
        f"turn {turn_id!r} already exists with another {differs}: repeat it unchanged, or begin a "
        "turn with another turn_id"
    )
    metadata = {"what": "turn", "name": turn_id, "differs": differs}
    code = grpc.StatusCode.ALREADY_EXISTS
    return ServiceError(code, Reason.ALREADY_EXISTS, message, metadata=metadata)


def full_group(task_id: str, why: str) -> ServiceError:
    """FAILED_PRECONDITION: no rollout of the agent's own task is left to lease."""
    message = f"group {task_id!r} is full: {why}; go on with another task_id"
    return failed_precondition(Reason.GROUP_FULL, message)


def running_run(run_id: str) -> ServiceError:
    """FAILED_PRECONDITION: only an ended run may be deleted."""
    message = f"run {run_id!r} has not ended: call RunService.EndRun first"
    return failed_precondition(Reason.WRONG_STATE, message)


def deleted_run(run_id: str) -> ServiceError:
    """FAILED_PRECONDITION: a deletion was interrupted."""
    message = f"run {run_id!r} is being deleted: repeat RunService.DeleteRun until it succeeds"
    return failed_precondition(Reason.WRONG_STATE, message)


ERRORS: dict[str, Callable[..., ServiceError]] = {
    "UNKNOWN_RUN": unknown_run,
    "UNKNOWN_ROLLOUT": lambda name: not_found("rollout", name),
    "UNKNOWN_TURN": lambda name: not_found("turn", name),
    "UNKNOWN_STEP": lambda name: not_found("lease of step", name),
    "BAD_CREDENTIAL": lambda name: permission_denied(f"not the credential of rollout {name!r}"),
    "STALE_TURN": lambda name, given, current: stale_epoch(f"turn {name!r}", given, current),
    "STALE_TRAINER": lambda name, given, now: stale_epoch(f"trainer of run {name!r}", given, now),
    "OTHER_ROLLOUT": lambda name: already_exists("rollout", name),
    "OTHER_TURN": other_turn,
    "OTHER_TOKENS": lambda name, offset: already_exists("token of turn", f"{name}[{offset}]"),
    "OTHER_END": lambda name: already_exists("end of turn", name),
    "OTHER_TASK": lambda name: already_exists("task", name),
    "GAP": gap,
    "FINISHED_ROLLOUT": lambda name, state: finished_rollout(name, RolloutState(int(state)).name),
    "ENDED_TURN": ended_turn,
    "LOST_LEASE": lost_lease,
    "LOST_COLUMN": lost_column,
    "OTHER_COLUMN": lambda name, sample_id: already_exists(f"column {name!r} of", sample_id),
    "FULL_QUEUE": full_queue,
    "CLOSED_ADMISSION": closed_admission,
    "FULL_RUN": full_run,
    "STEP_ORDER": step_order,
    "OPEN_STEP": open_step,
    "TOO_MANY_GROUPS": too_many_groups,
    "MINIMUM_ABOVE": minimum_above,
    "FULL_GROUP": full_group,
    "RUNNING_RUN": running_run,
    "DELETED_RUN": deleted_run,
}


def store_error(name: str, *facts: object) -> ServiceError:
    """The error named `name` of ERRORS."""
    return ERRORS[name](*(shortened(str(fact)) for fact in facts))


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
    """The error that a Lua script returned."""
    return store_error(*(fact.decode() for fact in reply[1:]))
