"""The errors a process raises, and the codes they become.

    Exception
    ├── ServiceError              raised in a servicer; becomes the status of the call
    └── StartupError              raised before serving; ends the process with `exit_code`
        ├── UsageError            64: a flag that does not exist
        ├── DependencyUnavailable 69: something needed at start is not there
        └── ConfigError           78: a configuration that cannot be used

`status.py` puts a `ServiceError` on the wire. Retry only UNAVAILABLE, and RESOURCE_EXHAUSTED when
the status carries a RetryInfo.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum

import grpc

__all__ = [
    "ConfigError",
    "DependencyUnavailable",
    "ExitCode",
    "Reason",
    "ServiceError",
    "StartupError",
    "UsageError",
    "aborted",
    "already_exists",
    "deadline_exceeded",
    "exhausted",
    "failed_precondition",
    "invalid_argument",
    "not_found",
    "permission_denied",
    "stale_epoch",
    "unauthenticated",
    "unavailable",
]


class Reason(StrEnum):
    """Every ErrorInfo reason in seamflow: what a program branches on, stable once released."""

    INVALID_FIELD = "INVALID_FIELD"
    MALFORMED_MESSAGE = "MALFORMED_MESSAGE"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    STALE_EPOCH = "STALE_EPOCH"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    OFFSET_GAP = "OFFSET_GAP"
    ROLLOUT_FINISHED = "ROLLOUT_FINISHED"
    TURN_FINISHED = "TURN_FINISHED"
    STEP_OUT_OF_ORDER = "STEP_OUT_OF_ORDER"
    TOO_MANY_REQUESTS = "TOO_MANY_REQUESTS"
    ENGINE_FAILED = "ENGINE_FAILED"
    WEIGHTS_NOT_LOADED = "WEIGHTS_NOT_LOADED"
    INCOMPLETE_PUBLISH = "INCOMPLETE_PUBLISH"
    CHECKSUM_MISMATCH = "CHECKSUM_MISMATCH"
    UNSUPPORTED = "UNSUPPORTED"
    WRONG_STATE = "WRONG_STATE"
    STORE_UNAVAILABLE = "STORE_UNAVAILABLE"
    STORE_FULL = "STORE_FULL"
    PEER_UNAVAILABLE = "PEER_UNAVAILABLE"
    DRAINING = "DRAINING"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    INTERNAL = "INTERNAL"


class ExitCode(IntEnum):
    """How a process ends (the numbers of sysexits.h, which supervisors already know)."""

    CLEAN = 0
    USAGE = 64
    UNAVAILABLE = 69
    BUG = 70
    CONFIG = 78


class ServiceError(Exception):
    """A failed call: the canonical code, why, and what the caller can do about it.

    Attributes:
        code: canonical gRPC status code.
        reason: what a program branches on.
        message: for a person; never holds tokens, texts or secrets.
        metadata: facts a program may need, such as the current epoch.
        retry_after: seconds after which a retry may succeed; None says nothing about retrying.
        field: request field at fault, for INVALID_ARGUMENT.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: Reason,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_after: float | None = None,
        field: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.metadata = dict(metadata or {})
        self.retry_after = retry_after
        self.field = field


class StartupError(Exception):
    """The process cannot start; the message names the cure."""

    exit_code = ExitCode.BUG


class UsageError(StartupError):
    """A flag that does not exist or lacks its value."""

    exit_code = ExitCode.USAGE


class ConfigError(StartupError):
    """A configuration that cannot be used."""

    exit_code = ExitCode.CONFIG


class DependencyUnavailable(StartupError):  # noqa: N818 -- names the condition
    """Something the process needs at start is not there."""

    exit_code = ExitCode.UNAVAILABLE

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


def invalid_argument(field: str, value: object, cure: str) -> ServiceError:
    """INVALID_ARGUMENT: `field` holds `value`, and `cure` says what it may hold."""
    message = f"{field} is {value!r}: {cure}"
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_FIELD, message, field=field
    )


def not_found(what: str, name: str) -> ServiceError:
    """NOT_FOUND: there is no `what` called `name`."""
    message = f"{what} {name!r} does not exist"
    metadata = {"what": what, "name": name}
    return ServiceError(grpc.StatusCode.NOT_FOUND, Reason.NOT_FOUND, message, metadata=metadata)


def already_exists(what: str, name: str) -> ServiceError:
    """ALREADY_EXISTS: the same key came with another payload."""
    message = f"{what} {name!r} already exists with another content"
    metadata = {"what": what, "name": name}
    return ServiceError(
        grpc.StatusCode.ALREADY_EXISTS, Reason.ALREADY_EXISTS, message, metadata=metadata
    )


def failed_precondition(reason: Reason, message: str) -> ServiceError:
    """FAILED_PRECONDITION: the call is fine, the state is not; retrying alone does not help."""
    return ServiceError(grpc.StatusCode.FAILED_PRECONDITION, reason, message)


def aborted(reason: Reason, message: str) -> ServiceError:
    """ABORTED: lost against another caller; begin again at a higher level."""
    return ServiceError(grpc.StatusCode.ABORTED, reason, message)


def stale_epoch(what: str, given: int | str, current: int | str) -> ServiceError:
    """ABORTED / STALE_EPOCH: the caller's fence on `what` was taken over by a newer one."""
    message = f"epoch {given} of {what} is stale: the current one is {current}"
    metadata = {"what": what, "given_epoch": str(given), "current_epoch": str(current)}
    return ServiceError(grpc.StatusCode.ABORTED, Reason.STALE_EPOCH, message, metadata=metadata)


def exhausted(reason: Reason, message: str, retry_after: float) -> ServiceError:
    """RESOURCE_EXHAUSTED with a RetryInfo: back-pressure, try again in `retry_after` seconds."""
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, reason, message, retry_after=retry_after
    )


def unavailable(reason: Reason, message: str) -> ServiceError:
    """UNAVAILABLE: a dependency is down; retry with backoff."""
    return ServiceError(grpc.StatusCode.UNAVAILABLE, reason, message)


def deadline_exceeded(message: str) -> ServiceError:
    """DEADLINE_EXCEEDED: there was no time left."""
    return ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED, message)


def unauthenticated(message: str) -> ServiceError:
    """UNAUTHENTICATED: the caller did not prove who it is."""
    return ServiceError(grpc.StatusCode.UNAUTHENTICATED, Reason.UNAUTHENTICATED, message)


def permission_denied(message: str) -> ServiceError:
    """PERMISSION_DENIED: the caller is known and may not do this."""
    return ServiceError(grpc.StatusCode.PERMISSION_DENIED, Reason.PERMISSION_DENIED, message)
