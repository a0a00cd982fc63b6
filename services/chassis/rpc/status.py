"""Encoding of a ServiceError as `google.rpc.Status` with standard details."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from seamflow import errors
from seamflow.common.v1 import error_pb2
from seamflow.durations import to_duration

from services.chassis.errors import Reason, ServiceError

DOMAIN = "seamflow"
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
    """The status of `error`: ErrorInfo always, RetryInfo and BadRequest where they apply."""
    reason = error_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN, metadata=error.metadata)
    details: list[Message] = [reason]
    if error.retry_after is not None:
        details.append(error_pb2.RetryInfo(retry_delay=to_duration(error.retry_after)))
    if error.violations:
        details.append(_bad_request(error.violations))
    code: int = error.code.value[0]
    packed = [_pack(detail) for detail in details]
    return error_pb2.Status(code=code, message=error.message, details=packed)


def _pack(message: Message) -> AnyMessage:
    return AnyMessage(type_url=_type_url(message), value=message.SerializeToString())


def _type_url(message: Message) -> str:
    # The messages mirror google.rpc field by field; under its names, standard tools decode them.
    return f"type.googleapis.com/google.rpc.{message.DESCRIPTOR.name}"


def _bad_request(violations: Sequence[errors.FieldViolation]) -> error_pb2.BadRequest:
    kind = error_pb2.BadRequest.FieldViolation
    found = [kind(field=v.field, description=v.description) for v in violations]
    return error_pb2.BadRequest(field_violations=found)


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
