"""The bound on bytes of tokens in flight to the store, shared by all calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from services.chassis.errors import Reason, exhausted

_RETRY_SECONDS = 0.2


class InflightBytes:
    """Counts the bytes of tokens in flight and rejects calls that would exceed the bound."""

    def __init__(self, max_inflight_bytes: int) -> None:
        """`max_inflight_bytes` bounds their sum."""
        self._max_inflight_bytes = max_inflight_bytes
        self._inflight_bytes = 0

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Reserve `size` bytes of tokens for the duration of the context.

        Raises:
            ServiceError: RESOURCE_EXHAUSTED / STORE_FULL with a retry time.
        """
        # A single message always passes, whatever its size.
        if self._inflight_bytes and self._inflight_bytes + size > self._max_inflight_bytes:
            message = (
                f"{self._inflight_bytes} bytes of tokens wait for the store, and {size} more would "
                f"exceed max_inflight_bytes ({self._max_inflight_bytes}): the store is slow"
            )
            raise exhausted(Reason.STORE_FULL, message, _RETRY_SECONDS)
        self._inflight_bytes += size
        try:
            yield
        finally:
            self._inflight_bytes -= size
