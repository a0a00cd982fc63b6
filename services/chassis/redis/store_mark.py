"""A mark in Redis: a server that has come back without its data lacks it.

A service that went on would answer that its runs do not exist, and callers would act on that.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from redis import exceptions

from services.chassis.log import get_logger

_MESSAGE = (
    "the store is without its data: start Redis on the data it had, or restore a backup "
    "(docs/runbooks/restore.md); to begin anew with an empty store, restart this service"
)


_SETTLED_SECONDS = 10.0
"""A store that writes to its disk each second may lose a younger mark without having lost more than
that: it is marked again."""


class DataLostError(exceptions.ConnectionError):
    """Nothing is sent to this server until it has its data again."""


class StoreMark:
    """Set with the first connection if there is none, and read with each."""

    def __init__(self, key: str = "") -> None:
        """`key` holds the mark; empty: servers are not marked."""
        self.key = key
        self._value: bytes | None = None
        self._since = 0.0
        self.is_missing = False
        """Whether the server came back without it."""

    def commands(self) -> list[tuple[Any, ...]]:
        """What a new connection sends; the last reply is for `check`."""
        if not self.key:
            return []
        made = [("SET", self.key, uuid.uuid4().hex, "NX")] if self._value is None else []
        return [*made, ("GET", self.key)]

    def check(self, found: bytes | None) -> None:
        """Compare what the server has.

        Raises:
            DataLostError: it is not what it had before.
        """
        if not self.key:
            return
        now = time.monotonic()
        if self._value is None or now - self._since < _SETTLED_SECONDS:
            # None: the next connection marks it again.
            self._value, self._since = found, now
        lost = found != self._value
        if lost and not self.is_missing:
            get_logger().error("store_lost_its_data", key=self.key, error=_MESSAGE)
        self.is_missing = lost
        if lost:
            raise DataLostError(_MESSAGE)
