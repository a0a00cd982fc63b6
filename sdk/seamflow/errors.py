"""Errors that calls to seamflow raise.

SeamflowError
├── InvalidRequestError      the request is wrong; names the field and the cure
├── NotFoundError            no such run, rollout, node …
├── PermissionDeniedError    missing or wrong token or credential
├── PreconditionError        right request, wrong time
│   └── RunEndedError        the run has ended: no more tasks
├── ConflictError            same key, other content
├── StaleEpochError          another caller has taken over
├── ExhaustedError           back-pressure: retry after `retry_after`, if it is given
├── UnavailableError         the service cannot be reached now
├── DeadlineError            the deadline has passed
└── InternalError            a bug in seamflow; carries a request id
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError, Message

from seamflow.common.v1 import error_pb2
from seamflow.durations import seconds_of, to_duration

__all__ = [
    "ConflictError",
    "DeadlineError",
    "ExhaustedError",
    "FieldViolation",
    "InternalError",
    "InvalidRequestError",
    "NotFoundError",
    "PermissionDeniedError",
    "PreconditionError",
    "RunEndedError",
    "SeamflowError",
    "StaleEpochError",
    "UnavailableError",
    "decode",
    "from_status",
]


class FieldViolation(NamedTuple):
    """A field of a request that is outside its limits."""

    field: str
    """Path of the field, such as "sampling.temperature"."""
    description: str
    """What is wrong, and the allowed values."""


class SeamflowError(Exception):
    """Base of all errors; `reason` is stable and may be branched on."""

    def __init__(
        self,
        message: str,
        reason: str = "",
        retry_after: float | None = None,
        metadata: Mapping[str, str] | None = None,
        violations: Sequence[FieldViolation] = (),
    ) -> None:
        super().__init__(message)
        self.reason = reason
        """Name of an `ErrorReason` without its prefix; empty for an error of gRPC itself."""
        self.retry_after = retry_after
        """Seconds to wait before the next attempt; None: the server named no time."""
        self.metadata = dict(metadata or {})
        """Details, such as the current epoch; `request_id` finds the call in the server's logs."""
        self.violations = tuple(violations)
        """The fields at fault, if the request is wrong."""

    def __reduce__(self) -> tuple[type[SeamflowError], tuple[Any, ...]]:
        fields = (self.reason, self.retry_after, self.metadata, self.violations)
        return type(self), (str(self), *fields)


class InvalidRequestError(SeamflowError):
    """The request is wrong; the message names the field, the value and the cure."""


class NotFoundError(SeamflowError):
    """The named object does not exist."""


class PermissionDeniedError(SeamflowError):
    """The token or the rollout's credential is missing or wrong."""


class PreconditionError(SeamflowError):
    """The request is valid but not in the current state."""


class RunEndedError(PreconditionError):
    """The run has ended: there will be no more tasks."""


class ConflictError(SeamflowError):
    """The same key was used before with other content."""


class StaleEpochError(SeamflowError):
    """Another caller has taken over the turn, lease or assignment."""


class ExhaustedError(SeamflowError):
    """Back-pressure: retry after `retry_after` seconds; without one: a message is too large."""


class UnavailableError(SeamflowError):
    """The service cannot be reached now."""


class DeadlineError(SeamflowError):
    """The deadline has passed."""


class InternalError(SeamflowError):
    """A bug in seamflow; the message carries the request id to look for in its logs."""


_BY_CODE: dict[grpc.StatusCode, type[SeamflowError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.UNAUTHENTICATED: PermissionDeniedError,
    grpc.StatusCode.FAILED_PRECONDITION: PreconditionError,
    grpc.StatusCode.ALREADY_EXISTS: ConflictError,
    grpc.StatusCode.ABORTED: StaleEpochError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ExhaustedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    # Of a server that ends: who cancels a call of its own gets asyncio.CancelledError.
    grpc.StatusCode.CANCELLED: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
}


_SIGNS_OF_CONNECTION = (
    *("rst_stream", "stream removed", "goaway", "connection reset", "broken pipe"),
    *("socket closed", "http2", "transport"),
)


def decode(error: grpc.aio.AioRpcError) -> SeamflowError:
    """Convert a gRPC error, with everything that its details hold."""
    status = error_pb2.Status()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            status = _parsed(value)
    kind = _BY_CODE.get(error.code(), InternalError)
    if kind is InternalError and not status.details and _is_of_connection(error.details() or ""):
        kind = UnavailableError
    return _filled(kind, error.details() or error.code().name, status)


def _is_of_connection(details: str) -> bool:
    """Whether gRPC itself failed, because its connection broke or the service was restarted."""
    return any(sign in details.lower() for sign in _SIGNS_OF_CONNECTION)


def to_status(
    code: grpc.StatusCode,
    message: str,
    reason: str,
    *,
    metadata: Mapping[str, str] | None = None,
    retry_after: float | None = None,
    violations: Sequence[FieldViolation] = (),
) -> error_pb2.Status:
    """What `from_status` reads: ErrorInfo always, RetryInfo and BadRequest where they apply."""
    details: list[Message] = [
        error_pb2.ErrorInfo(reason=reason, domain="seamflow", metadata=metadata)
    ]
    if retry_after is not None:
        details.append(error_pb2.RetryInfo(retry_delay=to_duration(retry_after)))
    if violations:
        kind = error_pb2.BadRequest.FieldViolation
        found = [kind(field=v.field, description=v.description) for v in violations]
        details.append(error_pb2.BadRequest(field_violations=found))
    # As error.proto says: the type urls name google.rpc, whose messages ours mirror.
    prefix = "type.googleapis.com/google.rpc."
    packed = [
        AnyMessage(type_url=prefix + each.DESCRIPTOR.name, value=each.SerializeToString())
        for each in details
    ]
    number: int = code.value[0]
    return error_pb2.Status(code=number, message=message, details=packed)


def from_status(status: error_pb2.Status) -> SeamflowError:
    """Convert a status inside a response, like `decode`."""
    codes = {code.value[0]: code for code in _BY_CODE}
    kind = _BY_CODE[codes[status.code]] if status.code in codes else InternalError
    return _filled(kind, status.message, status)


def _parsed(value: bytes) -> error_pb2.Status:
    try:
        return error_pb2.Status.FromString(value)
    except DecodeError:
        return error_pb2.Status()


def _filled(kind: type[SeamflowError], message: str, status: error_pb2.Status) -> SeamflowError:
    error = kind(message)
    for detail in status.details:
        if detail.type_url.endswith("/google.rpc.ErrorInfo"):
            info = error_pb2.ErrorInfo.FromString(detail.value)
            error.reason, error.metadata = info.reason, dict(info.metadata)
        elif detail.type_url.endswith("/google.rpc.RetryInfo"):
            error.retry_after = seconds_of(error_pb2.RetryInfo.FromString(detail.value).retry_delay)
        elif detail.type_url.endswith("/google.rpc.BadRequest"):
            found = error_pb2.BadRequest.FromString(detail.value).field_violations
            error.violations = tuple(FieldViolation(v.field, v.description) for v in found)
    return error
