"""Retry a call until its service answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from seamflow.errors import DeadlineError, SeamflowError
from seamflow.retry import retrying

from services.chassis.log import get_logger

__all__ = ["MARGIN_SECONDS", "retry_forever"]

MARGIN_SECONDS = 15.0
"""Time after the end of a long poll at which an unanswered call is retried."""

T = TypeVar("T")


async def retry_forever(name: str, call: Callable[[], Awaitable[T]]) -> T:
    """Retry an idempotent call while its service is unavailable, frozen or busy; log each retry."""

    def report(error: SeamflowError) -> None:
        get_logger().warning("call_retried", call=name, error=str(error))

    while True:
        try:
            return await retrying(call, on_retry=report)
        except DeadlineError as error:
            report(error)
