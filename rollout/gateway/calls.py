"""Calls to other services on behalf of an agent: retried, with their failures passed on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from seamflow.errors import SeamflowError
from seamflow.retry import retrying

from services.chassis.rpc.status import from_dependency

__all__ = ["call_until_answered"]

T = TypeVar("T")


async def call_until_answered(call: Callable[[], Awaitable[T]]) -> T:
    """Retry the call while the service is unavailable or pushes back.

    The agent's own deadline bounds this: when it passes, gRPC cancels the handler.

    Raises:
        ServiceError: any other failure.
    """
    try:
        return await retrying(call)
    except SeamflowError as error:
        raise from_dependency(error) from error
