"""Errors of the rollout gateway, as clients of the HTTP API see them."""

from __future__ import annotations

import pytest
from seamflow.errors import (
    ConflictError,
    DeadlineError,
    ExhaustedError,
    FieldViolation,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
    RunEndedError,
    SeamflowError,
    StaleEpochError,
    UnavailableError,
)

from rollout.http_gateway.api_error import ApiError, from_seamflow, invalid


@pytest.mark.parametrize(
    ("error", "status", "is_retried"),
    [
        (InvalidRequestError("m"), 400, False),
        (PermissionDeniedError("m"), 401, False),
        (NotFoundError("m"), 404, False),
        (PreconditionError("m"), 409, False),
        (RunEndedError("m"), 409, False),
        (ConflictError("m"), 409, False),
        (ExhaustedError("m"), 413, False),
        (ExhaustedError("m", retry_after=0.2), 429, True),
        (StaleEpochError("m"), 503, True),
        (UnavailableError("m"), 503, True),
        (DeadlineError("m"), 504, True),
        (InternalError("m"), 500, False),
    ],
)
def test_each_has_a_status_and_says_whether_a_retry_helps(
    error: SeamflowError, status: int, is_retried: bool
) -> None:
    """SDKs repeat 409 and 500 on their own, unless they are told not to."""
    found = from_seamflow(error)
    assert found.status == status
    assert found.headers()["x-should-retry"] == ("true" if is_retried else "false")


@pytest.mark.parametrize(("seconds", "shown"), [(0.2, "1"), (1.4, "1"), (7.0, "7"), (None, None)])
def test_the_time_of_a_retry_is_whole_seconds(seconds: float | None, shown: str | None) -> None:
    """At least one: 0 would mean at once."""
    error = ApiError(429, "m", retry_after=seconds)
    assert error.headers().get("retry-after") == shown


def test_a_bug_is_told_by_its_number_alone() -> None:
    """Nothing of its text reaches an agent."""
    error = from_seamflow(InternalError("secret", metadata={"request_id": "r7"}))
    assert "r7" in error.message
    assert "secret" not in error.message


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("messages.messages[0].role", "messages[0].role"),
        ("sampling.max_new_tokens", "max_tokens"),
        ("sampling.top_p", "top_p"),
        ("messages.tools[1].parameters_json", "tools[1].function.parameters"),
        ("messages.template_arguments_json", "chat_template_kwargs"),
    ],
)
def test_fields_have_the_names_of_requests(field: str, param: str) -> None:
    """In the message and as the parameter at fault."""
    violation = FieldViolation(field, "is wrong")
    error = from_seamflow(InvalidRequestError(f"{field} is wrong", violations=[violation]))
    assert (error.param, error.message) == (param, f"{param} is wrong")


def test_a_prompt_that_is_too_long_says_by_how_much() -> None:
    """In the words by which programs know that they have to shorten it."""
    numbers = {"num_tokens": "9", "max_context": "8"}
    error = from_seamflow(
        InvalidRequestError("m", reason="CONTEXT_LENGTH_EXCEEDED", metadata=numbers)
    )
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert (error.num_tokens, error.max_context) == (9, 8)
    assert "maximum context length is 8 tokens" in error.message


def test_a_dialect_names_its_own_fields() -> None:
    """The others stay."""
    error = invalid("a.b", "a.b is 1, and c is 2").renamed({"a.b": "x"})
    assert (error.param, error.message) == ("x", "x is 1, and c is 2")
