"""Encoding of a ServiceError as `google.rpc.Status` with standard details."""

from __future__ import annotations

import grpc
from seamflow import errors
from seamflow.common.v1 import error_pb2

from services.chassis.errors import Reason, ServiceError

DETAILS_KEY = "grpc-status-details-bin"

_CODES: dict[type[errors.SeamflowError], grpc.StatusCode] = {
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    errors.PreconditionError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ConflictError: grpc.StatusCode.ALREADY_EXISTS,
    errors.StaleEpochError: grpc.StatusCode.ABORTED,
    errors.ExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    # The dependency's deadline, not the caller's.
    errors.DeadlineError: grpc.StatusCode.UNAVAILABLE,
}


def encode(error: ServiceError) -> bytes:
    return message(error).SerializeToString()


def message(error: ServiceError) -> error_pb2.Status:
    """The status of `error` with its details."""
    return errors.to_status(
        error.code,
        error.message,
        error.reason.value,
        metadata=error.metadata,
        retry_after=error.retry_after,
        violations=error.violations,
    )


def from_dependency(error: errors.SeamflowError) -> ServiceError:
    """The failure of a call to another service as that of the call that needed it.

    Reason, metadata, fields at fault and retry time stay. An error of gRPC itself names internal
    addresses, so only its code is passed on.
    """
    code = _CODES.get(type(error), grpc.StatusCode.INTERNAL)
    if error.reason:
        return ServiceError(
            code,
            Reason(error.reason),
            str(error),
            metadata=error.metadata,
            retry_after=error.retry_after,
            violations=error.violations,
        )
    if isinstance(error, errors.ExhaustedError):
        message = f"a message to or from a required service is too large: {error}"
        return ServiceError(code, Reason.DEPENDENCY_UNAVAILABLE, message)
    if code is grpc.StatusCode.UNAVAILABLE:
        message = "a required service is unavailable"
        return ServiceError(code, Reason.DEPENDENCY_UNAVAILABLE, message)
    message = f"a required service refused the call with {code.name} and gave no reason"
    return ServiceError(code, Reason.INTERNAL, message)
