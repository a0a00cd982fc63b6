"""Calls to other services on behalf of an agent: retried, with their failures passed on."""

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
    """Retry the call while the service is unavailable or pushes back.

    The agent's own deadline bounds this: when it passes, gRPC cancels the handler.

    Raises:
        ServiceError: any other failure.
    """
    try:
        return await retrying(call)
    except errors.SeamflowError as error:
        raise to_service_error(error) from error


def to_service_error(error: errors.SeamflowError) -> ServiceError:
    """The same error as a status of this gateway: same code, reason and message."""
    code = _CODES.get(type(error), grpc.StatusCode.INTERNAL)
    reason = Reason(error.reason) if error.reason in Reason.__members__ else Reason.INTERNAL
    return ServiceError(code, reason, str(error))
