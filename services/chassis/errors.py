"""Errors of a process, and the status and exit codes they map to.

    Exception
    ├── ServiceError              raised in a servicer; becomes the status of the call
    └── StartupError              raised before serving; ends the process with `exit_code`
        ├── UsageError            64: a flag that does not exist
        ├── DependencyUnavailable 69: a dependency is unavailable at start
        └── ConfigError           78: an invalid configuration

`status.py` puts a `ServiceError` on the wire. Retry only UNAVAILABLE, and RESOURCE_EXHAUSTED when
the status carries a RetryInfo.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum, StrEnum

import grpc
from seamflow.errors import FieldViolation


class Reason(StrEnum):
    """The values of `ErrorReason` in error.proto, which says what each means."""

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
    DEPENDENCY_UNAVAILABLE = "DEPENDENCY_UNAVAILABLE"
    DRAINING = "DRAINING"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    INTERNAL = "INTERNAL"
    RUN_ENDED = "RUN_ENDED"
    GROUP_FULL = "GROUP_FULL"
    RELEASES_TOO_FAR_APART = "RELEASES_TOO_FAR_APART"
    CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
    ENVIRONMENT_FAILED = "ENVIRONMENT_FAILED"

    @classmethod
    def _missing_(cls, value: object) -> Reason:
        """A reason that another service of a newer release gave, to pass on."""
        newer = str.__new__(cls, value)
        newer._name_ = newer._value_ = str(value)
        return newer


_MAX_SHOWN = 80
_MAX_TEXT = 1500


class ExitCode(IntEnum):
    """Exit codes of a process, as in sysexits.h."""

    CLEAN = 0
    USAGE = 64
    UNAVAILABLE = 69
    BUG = 70
    CONFIG = 78


class ServiceError(Exception):
    """A failed call: its canonical code, reason and cure.

    Attributes:
        code: canonical gRPC status code.
        reason: machine-readable cause.
        message: human-readable, at most 1,500 characters; never holds tokens, texts or secrets.
        metadata: machine-readable details, such as the current epoch; values of at most 80
            characters.
        retry_after: seconds after which a retry may succeed; None: unspecified.
        violations: request fields at fault, for INVALID_ARGUMENT.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: Reason,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_after: float | None = None,
        violations: Sequence[FieldViolation] = (),
    ) -> None:
        message = shortened(message, _MAX_TEXT)
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.metadata = {k: shortened(v) for k, v in (metadata or {}).items()}
        self.retry_after = retry_after
        self.violations = tuple(violations)


class StartupError(Exception):
    """The process cannot start; the message names the cure."""

    exit_code = ExitCode.BUG


class UsageError(StartupError):
    """A flag that does not exist or lacks its value."""

    exit_code = ExitCode.USAGE


class ConfigError(StartupError):
    """The configuration is invalid."""

    exit_code = ExitCode.CONFIG


class DependencyUnavailable(StartupError):  # noqa: N818 -- names the condition
    """A dependency that the process needs at start is unavailable."""

    exit_code = ExitCode.UNAVAILABLE

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


def shown(value: object) -> str:
    """`value` as an error's text shows it: its start, where it is longer than 80 characters."""
    if isinstance(value, str):
        return repr(shortened(value))
    return shortened(repr(value))


def shortened(text: str, longest: int = _MAX_SHOWN) -> str:
    """`text`, or its start and "…" if it has more than `longest` characters."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def invalid_argument(field: str, value: object, cure: str) -> ServiceError:
    """INVALID_ARGUMENT: `field` holds `value`; `cure` names the allowed values."""
    message = f"{field} is {shown(value)}: {cure}"
    violation = FieldViolation(field, message)
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_FIELD, message, violations=[violation]
    )


def context_length_exceeded(num_tokens: int, max_context: int) -> ServiceError:
    """INVALID_ARGUMENT: a prompt of `num_tokens` leaves no room in a context of `max_context`."""
    cure = f"the model reads at most {max_context - 1} and samples at least one: send fewer"
    message = f"the prompt has {num_tokens} tokens: {cure}"
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        Reason.CONTEXT_LENGTH_EXCEEDED,
        message,
        metadata={"num_tokens": str(num_tokens), "max_context": str(max_context)},
        violations=[FieldViolation("prompt", message)],
    )


def not_found(what: str, name: str) -> ServiceError:
    """NOT_FOUND: there is no `what` called `name`."""
    message = f"{what} {shown(name)} does not exist"
    metadata = {"what": what, "name": name}
    return ServiceError(grpc.StatusCode.NOT_FOUND, Reason.NOT_FOUND, message, metadata=metadata)


def already_exists(what: str, name: str) -> ServiceError:
    """ALREADY_EXISTS: the key is in use with another payload."""
    message = f"{what} {shown(name)} already exists with different content"
    metadata = {"what": what, "name": name}
    return ServiceError(
        grpc.StatusCode.ALREADY_EXISTS, Reason.ALREADY_EXISTS, message, metadata=metadata
    )


def failed_precondition(reason: Reason, message: str) -> ServiceError:
    """FAILED_PRECONDITION: valid call, wrong state; retrying alone does not help."""
    return ServiceError(grpc.StatusCode.FAILED_PRECONDITION, reason, message)


def aborted(reason: Reason, message: str) -> ServiceError:
    """ABORTED: a conflict with another caller; retry at a higher level."""
    return ServiceError(grpc.StatusCode.ABORTED, reason, message)


def stale_epoch(what: str, given: int | str, current: int | str) -> ServiceError:
    """ABORTED / STALE_EPOCH: a newer epoch of `what` has fenced the caller."""
    message = (
        f"epoch {given} of {shortened(what, 2 * _MAX_SHOWN)} is stale: the current one is {current}"
    )
    metadata = {"what": what, "given_epoch": str(given), "current_epoch": str(current)}
    return ServiceError(grpc.StatusCode.ABORTED, Reason.STALE_EPOCH, message, metadata=metadata)


def exhausted(reason: Reason, message: str, retry_after: float) -> ServiceError:
    """RESOURCE_EXHAUSTED with a RetryInfo: back-pressure; retry after `retry_after` seconds."""
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, reason, message, retry_after=retry_after
    )


def unavailable(reason: Reason, message: str) -> ServiceError:
    """UNAVAILABLE: a dependency is down; retry with backoff."""
    return ServiceError(grpc.StatusCode.UNAVAILABLE, reason, message)


def deadline_exceeded(message: str) -> ServiceError:
    """DEADLINE_EXCEEDED: the call took longer than its deadline."""
    return ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED, message)


def unauthenticated(message: str) -> ServiceError:
    """UNAUTHENTICATED: no valid credentials."""
    return ServiceError(grpc.StatusCode.UNAUTHENTICATED, Reason.UNAUTHENTICATED, message)


def permission_denied(message: str) -> ServiceError:
    """PERMISSION_DENIED: the caller is authenticated but not authorized."""
    return ServiceError(grpc.StatusCode.PERMISSION_DENIED, Reason.PERMISSION_DENIED, message)
