"""Calls that are repeated until they succeed or are refused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from seamflow.errors import DeadlineError, SeamflowError
from seamflow.retry import retrying

from services.chassis.log import get_logger

__all__ = ["retry_forever"]

T = TypeVar("T")


async def retry_forever(call: Callable[[], Awaitable[T]]) -> T:
    """The answer of `call`, which is repeated while the service is away.

    Raises:
        SeamflowError: the service refused the call.
    """

    def report(error: SeamflowError) -> None:
        get_logger().warning("call_retried", error=str(error))

    while True:
        try:
            return await retrying(call, on_retry=report)
        except DeadlineError as error:
            report(error)
