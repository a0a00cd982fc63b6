"""Failures of calls to an environment server, as statuses of the contract."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import grpc
import grpc.aio

from seamflow.client.plain_values import whole_text
from seamflow.common.v1 import error_pb2, tokens_pb2
from seamflow.enum_names import enum_name
from seamflow.environment.environment import CapacityReached, EnvironmentFailed
from seamflow.errors import FieldViolation, to_status
from seamflow.user_code.user_calls import user_place

T = TypeVar("T")
_log = logging.getLogger("seamflow.environment")
_MAX_TEXT = 1500
_MAX_SHOWN = 80


class CallError(Exception):
    """A failed call: its status code, reason, text, details and retry time."""

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_after: float | None = None,
        field: str = "",
    ) -> None:
        super().__init__(whole_text(message[:_MAX_TEXT]))
        self.code = code
        self.reason = reason
        self._metadata = metadata
        self._retry_after = retry_after
        self._field = field

    def status(self) -> error_pb2.Status:
        """The status with its details, as error.proto says."""
        return to_status(
            self.code,
            str(self),
            self.reason,
            metadata=self._metadata,
            retry_after=self._retry_after,
            violations=[FieldViolation(self._field, str(self))] if self._field else (),
        )


def invalid_field(field: str, value: object, cure: str) -> CallError:
    """INVALID_ARGUMENT: `field` holds `value`; `cure` names the allowed values."""
    shown = repr(value)
    shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[: _MAX_SHOWN - 1]}…"
    message = f"{field} is {shown}: {cure}"
    return CallError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", message, field=field)


def environment_failed(
    message: str,
    failure_class: tokens_pb2.FailureClass.ValueType = tokens_pb2.FAILURE_CLASS_ENVIRONMENT,
) -> CallError:
    """FAILED_PRECONDITION: the user's code failed, by fault of `failure_class`."""
    name = enum_name(tokens_pb2.FailureClass, failure_class)
    metadata = {"failure_class": name}
    return CallError(
        grpc.StatusCode.FAILED_PRECONDITION, "ENVIRONMENT_FAILED", message, metadata=metadata
    )


def from_user(error: Exception, what: str) -> CallError:
    """What the user's code raised in `what`, such as "reset of task 't'"."""
    if isinstance(error, CallError):
        return error
    if isinstance(error, CapacityReached):
        return CallError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "TOO_MANY_REQUESTS",
            str(error),
            retry_after=error.retry_after,
        )
    _log.exception("%s failed", what, exc_info=error)
    if isinstance(error, EnvironmentFailed):
        return environment_failed(f"{what}: {error}", error.failure_class)
    return environment_failed(f"{what} raised {error!r}{user_place(error)}")


class Guard:
    """Admits calls with the right bearer token, and ends failed ones with their status."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    async def answer(
        self, context: grpc.aio.ServicerContext[Any, Any], work: Callable[[], Awaitable[T]]
    ) -> T:
        """The result of `work()`."""
        try:
            self.check(context)
            return await work()
        except CallError as error:
            await self.abort(context, error)
            raise

    def check(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Raise `CallError` UNAUTHENTICATED for a wrong or missing token."""
        if self._token is None:
            return
        shown = [v for k, v in context.invocation_metadata() or () if k == "authorization"]
        wanted = f"Bearer {self._token}"
        if not any(hmac.compare_digest(str(v).encode(), wanted.encode()) for v in shown):
            raise CallError(
                grpc.StatusCode.UNAUTHENTICATED,
                "UNAUTHENTICATED",
                'send metadata "authorization: Bearer <token>" with the token of this server',
            )

    async def abort(self, context: grpc.aio.ServicerContext[Any, Any], error: CallError) -> None:
        trailer = (("grpc-status-details-bin", error.status().SerializeToString()),)
        await context.abort(error.code, str(error), trailer)
