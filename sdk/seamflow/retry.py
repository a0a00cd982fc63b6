"""Retries of calls: every mutating rpc of seamflow is idempotent."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import grpc.aio

from seamflow import waits
from seamflow.errors import (
    DeadlineError,
    ExhaustedError,
    InternalError,
    SeamflowError,
    StaleEpochError,
    UnavailableError,
    decode,
)

__all__ = [
    "OF_ONE_CALL",
    "Attempt",
    "Backoff",
    "current_attempt",
    "may_resume",
    "may_retry",
    "retrying",
]

T = TypeVar("T")

OF_ONE_CALL = (DeadlineError, ExhaustedError, InternalError, StaleEpochError)
"""Failures that `retrying` raises and that say nothing of the next call: who leases work in a loop
waits and goes on, also after minutes without a store."""

_log = logging.getLogger("seamflow")


@dataclass(slots=True)
class Attempt:
    """The call that `retrying` repeats, as its channel names it."""

    call: str = "a call"
    """"/package.Service/Rpc of host:port"."""


current_attempt: ContextVar[Attempt | None] = ContextVar("seamflow_attempt", default=None)
"""Set by `retrying`, for channels to name their calls in."""


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


def may_resume(error: SeamflowError) -> bool:
    """Whether a broken stream of `Generate` is resumed by a new call, as `TurnStream` does.

    Also after a stale epoch: the store restarted during the call, so a new attempt takes the turn
    over.
    """
    return may_retry(error) or isinstance(error, StaleEpochError)


async def retrying(
    call: Callable[[], Awaitable[T]],
    *,
    timeout: float | None = None,
    on_retry: Callable[[SeamflowError], None] | None = None,
) -> T:
    """Retry `call()` with backoff while the service is unavailable or pushes back.

    For at most `timeout` seconds, then it raises `DeadlineError`; None: without a limit. The first
    retry is logged as a warning; `on_retry` is called before each. Raises every other failure as a
    `SeamflowError`, also that of a service that was never reached (see `connect`).
    """
    attempt = Attempt()
    failed: SeamflowError | None = None
    token = current_attempt.set(attempt)
    try:
        with waits.waiting() as wait:
            async with asyncio.timeout(timeout) as limit:
                backoff = Backoff()
                while True:
                    try:
                        return await call()
                    except grpc.aio.AioRpcError as failure:
                        error = decode(failure)
                    except UnavailableError as unreachable:
                        raise _with_cause(unreachable, failed) from failed
                    if not may_retry(error):
                        raise error
                    if failed is None:
                        _log.warning("%s failed, retrying: %s", attempt.call, error)
                    failed = error
                    wait.say(f"{attempt.call}: {error}")
                    if on_retry is not None:
                        on_retry(error)
                    await backoff.wait(error.retry_after)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise _late(attempt, timeout, failed) from error
    finally:
        current_attempt.reset(token)


def _with_cause(error: UnavailableError, failed: SeamflowError | None) -> UnavailableError:
    if failed is None or error.reason:
        return error
    return UnavailableError(f"{error}; the last failure: {failed}")


def _late(attempt: Attempt, timeout: float | None, failed: SeamflowError | None) -> DeadlineError:
    why = f"; the last failure: {failed}" if failed else ""
    return DeadlineError(f"{attempt.call} did not succeed within {timeout:g} s{why}")
