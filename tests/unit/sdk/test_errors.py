"""Failures arrive as exceptions that say the reason and when to come back."""

from __future__ import annotations

import asyncio
import copy

import grpc
import grpc.aio
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from seamflow import errors
from seamflow.common.v1 import error_pb2
from seamflow.durations import to_duration
from seamflow.retry import Backoff, retrying


def failure(code: grpc.StatusCode, details: bytes | None = None) -> grpc.aio.AioRpcError:
    """What a stub raises."""
    trailing = grpc.aio.Metadata()
    if details is not None:
        trailing.add("grpc-status-details-bin", details)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details="no")


def status(retry_after: float = 2.5) -> bytes:
    """A status with a reason, its facts, a time, a field at fault and a detail nobody knows."""
    violation = error_pb2.BadRequest.FieldViolation(field="top_p", description="0 to 1")
    parts: dict[str, Message] = {
        "ErrorInfo": error_pb2.ErrorInfo(reason="TOO_MANY_REQUESTS", metadata={"queue": "7"}),
        "RetryInfo": error_pb2.RetryInfo(retry_delay=to_duration(retry_after)),
        "BadRequest": error_pb2.BadRequest(field_violations=[violation]),
        "Other": error_pb2.Status(code=3),
    }
    prefix = "type.googleapis.com/google.rpc."
    details = [
        AnyMessage(type_url=prefix + name, value=part.SerializeToString())
        for name, part in parts.items()
    ]
    return error_pb2.Status(details=details).SerializeToString()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequestError),
        (grpc.StatusCode.NOT_FOUND, errors.NotFoundError),
        (grpc.StatusCode.UNAUTHENTICATED, errors.PermissionDeniedError),
        (grpc.StatusCode.FAILED_PRECONDITION, errors.PreconditionError),
        (grpc.StatusCode.ALREADY_EXISTS, errors.ConflictError),
        (grpc.StatusCode.ABORTED, errors.StaleEpochError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.ExhaustedError),
        (grpc.StatusCode.UNAVAILABLE, errors.UnavailableError),
        (grpc.StatusCode.CANCELLED, errors.UnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineError),
        (grpc.StatusCode.UNKNOWN, errors.InternalError),
    ],
)
def test_each_code_has_its_exception(
    code: grpc.StatusCode, kind: type[errors.SeamflowError]
) -> None:
    """Callers branch on a class, and every class is a SeamflowError."""
    assert type(errors.decode(failure(code))) is kind
    assert issubclass(kind, errors.SeamflowError)


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", True),
        (grpc.StatusCode.UNKNOWN, "Stream removed", True),
        (grpc.StatusCode.INTERNAL, "Exception deserializing response!", False),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", False),
    ],
)
def test_what_grpc_says_of_a_broken_connection_may_be_retried(
    code: grpc.StatusCode, details: str, kind: bool
) -> None:
    """A service that restarts ends streams so; its own errors have details and are final."""
    empty = grpc.aio.Metadata()
    error = errors.decode(grpc.aio.AioRpcError(code, empty, empty, details=details))
    assert isinstance(error, errors.UnavailableError) is kind
    ours = (("grpc-status-details-bin", status()),)
    error = errors.decode(
        grpc.aio.AioRpcError(code, empty, grpc.aio.Metadata(*ours), details=details)
    )
    assert not isinstance(error, errors.UnavailableError)


def test_reason_and_retry_time_come_from_the_details() -> None:
    """The trailer's ErrorInfo and RetryInfo are decoded with protobuf alone."""
    error = errors.decode(failure(grpc.StatusCode.RESOURCE_EXHAUSTED, status()))
    assert (str(error), error.reason, error.retry_after) == ("no", "TOO_MANY_REQUESTS", 2.5)
    assert error.metadata == {"queue": "7"}
    assert error.violations == (errors.FieldViolation("top_p", "0 to 1"),)


def test_broken_details_are_ignored() -> None:
    """A trailer that is no status leaves the code and the message."""
    error = errors.decode(failure(grpc.StatusCode.NOT_FOUND, b"\xff\xff\xff"))
    assert (error.reason, error.retry_after) == ("", None)


def test_errors_can_be_copied_between_processes() -> None:
    """Everything survives a copy."""
    violations = [errors.FieldViolation("tasks", "fewer")]
    error = copy.copy(errors.ExhaustedError("full", "STORE_FULL", 1.5, {"a": "b"}, violations))
    assert (str(error), error.reason, error.retry_after) == ("full", "STORE_FULL", 1.5)
    assert (error.metadata, error.violations) == ({"a": "b"}, tuple(violations))


async def test_a_call_is_repeated_until_the_peer_is_back() -> None:
    """Unavailable and exhausted are waited out, each told to `on_retry`."""
    full = failure(grpc.StatusCode.RESOURCE_EXHAUSTED, status(0.01))
    answers = [failure(grpc.StatusCode.UNAVAILABLE), full]
    seen: list[errors.SeamflowError] = []

    async def call() -> str:
        if answers:
            raise answers.pop(0)
        return "done"

    assert await retrying(call, on_retry=seen.append) == "done"
    assert [type(e) for e in seen] == [errors.UnavailableError, errors.ExhaustedError]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequestError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.ExhaustedError),
    ],
)
async def test_what_cannot_be_cured_is_not_repeated(
    code: grpc.StatusCode, kind: type[errors.SeamflowError]
) -> None:
    """A refusal is raised at the first call, and so is exhaustion without a time to come back."""
    calls = 0

    async def call() -> None:
        nonlocal calls
        calls += 1
        raise failure(code)

    with pytest.raises(kind):
        await retrying(call)
    assert calls == 1


async def test_delays_grow_to_a_bound_and_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits double up to the bound, and are never shorter than a server asks."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    backoff = Backoff(first=1.0, longest=4.0)
    for _ in range(4):
        await backoff.wait()
    backoff.reset()
    await backoff.wait()
    await backoff.wait(at_least=9.0)
    bounds = [1.0, 2.0, 4.0, 4.0, 1.0]
    assert all(b / 2 <= w <= b for w, b in zip(waited, bounds, strict=False))
    assert waited[-1] == 9.0


def test_a_status_inside_an_answer_is_the_same_failure() -> None:
    """Batched calls carry one status per part: class, words, reason and time as for a call."""
    message = error_pb2.Status.FromString(status())
    message.code, message.message = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], "full"
    error = errors.from_status(message)
    assert type(error) is errors.ExhaustedError
    assert (str(error), error.reason, error.retry_after) == ("full", "TOO_MANY_REQUESTS", 2.5)
    assert type(errors.from_status(error_pb2.Status(code=13))) is errors.InternalError
