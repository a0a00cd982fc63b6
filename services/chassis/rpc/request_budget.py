"""The bound on bytes of requests in progress, with a fair share for each owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from services.chassis.errors import Reason, ServiceError, exhausted

_RETRY_SECONDS = 0.5
_OWNER_SHARE = 8
"""An owner, such as a rollout, may use this part of the bytes."""


class RequestBudget:
    """Counts the requests in progress, of all and of each owner, and refuses those beyond."""

    def __init__(
        self,
        max_inflight_bytes: int,
        max_calls_per_owner: int = 0,
        *,
        full: Reason = Reason.TOO_MANY_REQUESTS,
        retry_seconds: float = _RETRY_SECONDS,
    ) -> None:
        """`max_inflight_bytes` bounds the sum of all, an eighth of it that of one owner.

        Args:
            max_inflight_bytes: setting of this name.
            max_calls_per_owner: setting `max_calls_per_rollout`; 0 where requests have no owner.
            full: reason of a refusal.
            retry_seconds: time after which a refused caller may try again.
        """
        self._max_bytes = max_inflight_bytes
        self._max_calls = max_calls_per_owner
        self._full, self._retry_seconds = full, retry_seconds
        self._num_bytes = 0
        self._bytes_of: Counter[str] = Counter()
        self._calls_of: Counter[str] = Counter()

    @contextmanager
    def reserve(self, num_bytes: int, owner: str | None = None) -> Iterator[None]:
        """Count a request for the duration of the context; without an owner, of all alone.

        Raises:
            ServiceError: RESOURCE_EXHAUSTED with a retry time.
        """
        if owner is not None:
            self._check_owner(owner, num_bytes)
        self._check(num_bytes)
        self._count(owner, num_bytes, 1)
        try:
            yield
        finally:
            self._count(owner, -num_bytes, -1)

    def _check_owner(self, owner: str, num_bytes: int) -> None:
        if self._calls_of[owner] >= self._max_calls:
            limit = f"max_calls_per_rollout ({self._max_calls})"
            state = f"{self._calls_of[owner]} calls of this rollout are in progress"
            raise self._refused(state, limit)
        # The only request of an owner always passes, whatever its size.
        share = self._max_bytes // _OWNER_SHARE
        if self._calls_of[owner] and self._bytes_of[owner] + num_bytes > share:
            limit = f"this rollout's share, an eighth of max_inflight_bytes ({self._max_bytes})"
            state = f"{self._bytes_of[owner]} bytes of requests are in progress"
            raise self._refused(state, limit)

    def _check(self, num_bytes: int) -> None:
        # The only request always passes, whatever its size.
        if self._num_bytes and self._num_bytes + num_bytes > self._max_bytes:
            limit = f"max_inflight_bytes ({self._max_bytes})"
            state = f"{self._num_bytes} bytes of requests are in progress"
            raise self._refused(state, limit)

    def _refused(self, state: str, limit: str) -> ServiceError:
        message = f"{state}, and this one would exceed {limit}: retry later"
        return exhausted(self._full, message, self._retry_seconds)

    def _count(self, owner: str | None, num_bytes: int, num_calls: int) -> None:
        self._num_bytes += num_bytes
        if owner is None:
            return
        self._bytes_of[owner] += num_bytes
        self._calls_of[owner] += num_calls
        if not self._calls_of[owner]:
            del self._bytes_of[owner], self._calls_of[owner]
