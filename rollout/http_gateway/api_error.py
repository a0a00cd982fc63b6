"""Errors of the HTTP API, independent of a dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus

from seamflow.errors import (
    ConflictError,
    DeadlineError,
    ExhaustedError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
    SeamflowError,
    StaleEpochError,
    UnavailableError,
)

CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
_RETRIED = (408, 429, 502, 503, 504)
_STATUS: tuple[tuple[type[SeamflowError], HTTPStatus], ...] = (
    (InvalidRequestError, HTTPStatus.BAD_REQUEST),
    (NotFoundError, HTTPStatus.NOT_FOUND),
    (PermissionDeniedError, HTTPStatus.UNAUTHORIZED),
    (PreconditionError, HTTPStatus.CONFLICT),
    (ConflictError, HTTPStatus.CONFLICT),
    (StaleEpochError, HTTPStatus.SERVICE_UNAVAILABLE),
    (UnavailableError, HTTPStatus.SERVICE_UNAVAILABLE),
    (DeadlineError, HTTPStatus.GATEWAY_TIMEOUT),
)
# Names of fields in the contract, and in requests of the dialects.
_FIELDS = (
    ("messages.messages", "messages"),
    ("messages.tools", "tools"),
    ("messages.template_arguments_json", "chat_template_kwargs"),
    ("token_ids.token_ids", "token_ids"),
    ("sampling.max_new_tokens", "max_tokens"),
    ("sampling.", ""),
    (".arguments_json", ".function.arguments"),
    (".parameters_json", ".function.parameters"),
)


@dataclass(eq=False)
class ApiError(Exception):
    """A failed request; a dialect gives it its form."""

    status: int
    message: str
    """For people: names the parameter, its value and the cure."""
    param: str | None = None
    """Parameter at fault, such as "messages[0].role"."""
    code: str | None = None
    retry_after: float | None = None
    num_tokens: int | None = None
    max_context: int | None = None

    @property
    def should_retry(self) -> bool:
        return self.status in _RETRIED

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """The error with each field called as `names` say."""
        message, param = self.message, self.param
        for ours, theirs in names.items():
            message = message.replace(ours, theirs)
            param = param and param.replace(ours, theirs)
        return replace(self, message=message, param=param)

    def headers(self) -> dict[str, str]:
        """What SDKs obey: they retry 409 and 429 unless told otherwise."""
        headers = {"x-should-retry": "true" if self.should_retry else "false"}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after)))
        return headers


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """Status 400 for the parameter `param`."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param, code)


def from_seamflow(error: SeamflowError) -> ApiError:
    """The error of a call to the rollout gateway."""
    status = next((s for kind, s in _STATUS if isinstance(error, kind)), None)
    if isinstance(error, ExhaustedError):
        is_back_pressure = error.retry_after is not None
        status = (
            HTTPStatus.TOO_MANY_REQUESTS
            if is_back_pressure
            else HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        )
    if status is None:
        number = error.metadata.get("request_id", "unknown")
        message = f"internal error; request id {number} finds it in the gateway's log"
        return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="internal_error")
    if error.reason == CONTEXT_LENGTH_EXCEEDED:
        return _too_long(error)
    param = error.violations[0].field if error.violations else None
    return ApiError(
        status=status,
        message=_renamed(str(error)),
        param=None if param is None else _renamed(param),
        code=error.reason.lower() or None,
        retry_after=error.retry_after,
    )


def _too_long(error: SeamflowError) -> ApiError:
    num_tokens, max_context = (int(error.metadata[n]) for n in ("num_tokens", "max_context"))
    return ApiError(
        status=HTTPStatus.BAD_REQUEST,
        message=f"This model's maximum context length is {max_context} tokens, and the messages "
        f"have {num_tokens} tokens: shorten the messages.",
        param="messages",
        code=CONTEXT_LENGTH_EXCEEDED.lower(),
        num_tokens=num_tokens,
        max_context=max_context,
    )


def _renamed(text: str) -> str:
    for ours, theirs in _FIELDS:
        text = text.replace(ours, theirs)
    return text
