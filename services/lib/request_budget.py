"""The bound on bytes of requests in progress, with a fair share for each owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from services.chassis.errors import Reason, ServiceError, exhausted

__all__ = ["RequestBudget"]

_RETRY_SECONDS = 0.5
_OWNER_SHARE = 8
"""An owner, such as a rollout, may use this part of the bytes."""


class RequestBudget:
    """Counts the requests in progress, by owner, and refuses those beyond the bounds."""

    def __init__(self, max_inflight_bytes: int, max_calls_per_owner: int) -> None:
        """`max_inflight_bytes` bounds the sum of all, an eighth of it that of one owner."""
        self._max_bytes = max_inflight_bytes
        self._max_calls = max_calls_per_owner
        self._num_bytes = 0
        self._bytes_of: Counter[str] = Counter()
        self._calls_of: Counter[str] = Counter()

    @contextmanager
    def reserve(self, owner: str, num_bytes: int) -> Iterator[None]:
        """Count a request for the duration of the context.

        Raises:
            ServiceError: RESOURCE_EXHAUSTED with a retry time.
        """
        self._check(owner, num_bytes)
        self._count(owner, num_bytes, 1)
        try:
            yield
        finally:
            self._count(owner, -num_bytes, -1)

    def _check(self, owner: str, num_bytes: int) -> None:
        if self._calls_of[owner] >= self._max_calls:
            limit = f"max_calls_per_rollout ({self._max_calls})"
            raise _refused(f"{self._calls_of[owner]} calls of this rollout are in progress", limit)
        # The only request of an owner, or of all, always passes, whatever its size.
        share = self._max_bytes // _OWNER_SHARE
        if self._calls_of[owner] and self._bytes_of[owner] + num_bytes > share:
            limit = f"this rollout's share, an eighth of max_inflight_bytes ({self._max_bytes})"
            raise _refused(f"{self._bytes_of[owner]} bytes of requests are in progress", limit)
        if self._num_bytes and self._num_bytes + num_bytes > self._max_bytes:
            limit = f"max_inflight_bytes ({self._max_bytes})"
            raise _refused(f"{self._num_bytes} bytes of requests are in progress", limit)

    def _count(self, owner: str, num_bytes: int, num_calls: int) -> None:
        self._num_bytes += num_bytes
        self._bytes_of[owner] += num_bytes
        self._calls_of[owner] += num_calls
        if not self._calls_of[owner]:
            del self._bytes_of[owner], self._calls_of[owner]


def _refused(state: str, limit: str) -> ServiceError:
    message = f"{state}, and this one would exceed {limit}: retry later"
    return exhausted(Reason.TOO_MANY_REQUESTS, message, _RETRY_SECONDS)
