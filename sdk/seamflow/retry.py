"""Retries of calls: every mutating rpc of seamflow is idempotent."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc.aio

from seamflow.errors import SeamflowError, UnavailableError, decode

__all__ = ["Backoff", "may_retry", "retrying"]

T = TypeVar("T")


class Backoff:
    """Exponential delays with jitter, from `first` up to `longest` seconds."""

    def __init__(self, first: float = 0.05, longest: float = 2.0) -> None:
        self._first, self._longest = first, longest
        self._next = first

    def reset(self) -> None:
        """Start again from the shortest delay."""
        self._next = self._first

    async def wait(self, at_least: float | None = None) -> None:
        """Sleep for the next delay, or for `at_least` seconds if that is longer."""
        delay = self._next * random.uniform(0.5, 1.0)
        self._next = min(2 * self._next, self._longest)
        await asyncio.sleep(max(delay, at_least or 0.0))


def may_retry(error: SeamflowError) -> bool:
    """Whether the same call may succeed later: unavailable, or back-pressure that names a time.

    gRPC's own RESOURCE_EXHAUSTED names none: a message is too large, and stays so.
    """
    return isinstance(error, UnavailableError) or error.retry_after is not None


async def retrying(
    call: Callable[[], Awaitable[T]],
    *,
    on_retry: Callable[[SeamflowError], None] | None = None,
) -> T:
    """Retry `call()` with backoff while the service is unavailable or pushes back.

    Without a limit: bound it with `asyncio.timeout`. `on_retry` is called before each retry. Raises
    every other failure as a `SeamflowError`.
    """
    backoff = Backoff()
    while True:
        try:
            return await call()
        except grpc.aio.AioRpcError as failure:
            error = decode(failure)
        if not may_retry(error):
            raise error
        if on_retry is not None:
            on_retry(error)
        await backoff.wait(error.retry_after)
