"""Calls to other services on behalf of an agent: waited for, and failures passed on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
from seamflow import errors
from seamflow.retry import retrying

from services.chassis.errors import Reason, ServiceError

__all__ = ["call_until_answered", "to_service_error"]

T = TypeVar("T")

_CODES: dict[type[errors.SeamflowError], grpc.StatusCode] = {
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    errors.PreconditionError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ConflictError: grpc.StatusCode.ALREADY_EXISTS,
    errors.StaleEpochError: grpc.StatusCode.ABORTED,
    errors.DeadlineError: grpc.StatusCode.UNAVAILABLE,
}


async def call_until_answered(call: Callable[[], Awaitable[T]]) -> T:
    """Await the call until the peer answers: a restarting peer delays the agent, no more.

    The agent's own deadline bounds the wait: when it passes, gRPC cancels the handler.
    """
    try:
        return await retrying(call)
    except errors.SeamflowError as error:
        raise to_service_error(error) from error


def to_service_error(error: errors.SeamflowError) -> ServiceError:
    """The peer's refusal as ours: same code, same reason, same words."""
    code = _CODES.get(type(error), grpc.StatusCode.INTERNAL)
    reason = Reason(error.reason) if error.reason in Reason.__members__ else Reason.INTERNAL
    return ServiceError(code, reason, str(error))
