"""Encoding of a ServiceError as `google.rpc.Status` with standard details."""

from __future__ import annotations

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from seamflow.common.v1 import error_pb2
from seamflow.durations import to_duration
from seamflow.errors import (
    DeadlineError,
    ExhaustedError,
    NotFoundError,
    PreconditionError,
    SeamflowError,
    StaleEpochError,
    UnavailableError,
)

from services.chassis.errors import Reason, ServiceError

__all__ = ["DETAILS_KEY", "DOMAIN", "encode", "from_dependency", "message"]

DOMAIN = "seamflow"
DETAILS_KEY = "grpc-status-details-bin"

_FORWARDED: dict[type[SeamflowError], grpc.StatusCode] = {
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    ExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StaleEpochError: grpc.StatusCode.ABORTED,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    PreconditionError: grpc.StatusCode.FAILED_PRECONDITION,
}


def encode(error: ServiceError) -> bytes:
    """The serialized status of `error`."""
    return message(error).SerializeToString()


def message(error: ServiceError) -> error_pb2.Status:
    """The status of `error`: ErrorInfo always, RetryInfo and BadRequest where they apply."""
    reason = error_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN, metadata=error.metadata)
    details: list[Message] = [reason]
    if error.retry_after is not None:
        details.append(error_pb2.RetryInfo(retry_delay=to_duration(error.retry_after)))
    if error.field is not None:
        details.append(_violation(error.field, error.message))
    code: int = error.code.value[0]
    packed = [_pack(detail) for detail in details]
    return error_pb2.Status(code=code, message=error.message, details=packed)


def _pack(message: Message) -> AnyMessage:
    return AnyMessage(type_url=_type_url(message), value=message.SerializeToString())


def _type_url(message: Message) -> str:
    # The messages mirror google.rpc field by field; under its names, standard tools decode them.
    return f"type.googleapis.com/google.rpc.{message.DESCRIPTOR.name}"


def _violation(field: str, description: str) -> error_pb2.BadRequest:
    violation = error_pb2.BadRequest.FieldViolation(field=field, description=description)
    return error_pb2.BadRequest(field_violations=[violation])


def from_dependency(error: SeamflowError) -> ServiceError | None:
    """The error to answer with when a call to another service failed.

    None if the caller cannot act on it, such as for an invalid request of this process.
    """
    code = _FORWARDED.get(type(error))
    if code is None:
        return None
    if error.reason not in Reason.__members__:
        # gRPC's own error, whose text names internal addresses.
        return ServiceError(
            code, Reason.DEPENDENCY_UNAVAILABLE, "a required service is unavailable"
        )
    return ServiceError(code, Reason[error.reason], str(error), retry_after=error.retry_after)
