"""The bound on tokens that wait for the store, shared by every call that brings some."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from services.chassis.errors import Reason, exhausted

_RETRY_SECONDS = 0.2


class InflightBytes:
    """Counts the bytes of tokens under way; what would be too much is refused for a while."""

    def __init__(self, max_inflight_bytes: int) -> None:
        """`max_inflight_bytes` bounds them all together."""
        self._max_inflight_bytes = max_inflight_bytes
        self._inflight_bytes = 0

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Hold room for `size` bytes of tokens.

        Raises:
            ServiceError: RESOURCE_EXHAUSTED / STORE_FULL with a time; nothing was done.
        """
        # One message alone may always pass, however large.
        if self._inflight_bytes and self._inflight_bytes + size > self._max_inflight_bytes:
            message = (
                f"{self._inflight_bytes} bytes of tokens wait for the store, and {size} more would "
                f"be over max_inflight_bytes ({self._max_inflight_bytes}): the store is slow"
            )
            raise exhausted(Reason.STORE_FULL, message, _RETRY_SECONDS)
        self._inflight_bytes += size
        try:
            yield
        finally:
            self._inflight_bytes -= size
