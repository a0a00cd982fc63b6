"""Calls to other services that are repeated until they are answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from seamflow.errors import DeadlineError, SeamflowError
from seamflow.retry import retrying

from services.chassis.log import get_logger
from services.chassis.rpc.status import from_dependency

T = TypeVar("T")


async def retry_forever(name: str, call: Callable[[], Awaitable[T]]) -> T:
    """Retry an idempotent call while its service is unavailable, frozen or busy; log each retry.

    Raises:
        SeamflowError: the service refused the call.
    """

    def report(error: SeamflowError) -> None:
        get_logger().warning("call_retried", call=name, error=str(error))

    while True:
        try:
            return await retrying(call, on_retry=report)
        except DeadlineError as error:
            report(error)


async def call_until_answered(call: Callable[[], Awaitable[T]]) -> T:
    """Call another service on behalf of a caller, while it is unavailable or pushes back.

    The caller's own deadline bounds this: when it passes, gRPC cancels the handler.

    Raises:
        ServiceError: any other failure, passed on.
    """
    try:
        return await retrying(call)
    except SeamflowError as error:
        raise from_dependency(error) from error
