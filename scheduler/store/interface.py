"""The interface of the scheduler's store; one active scheduler, fenced at the commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from scheduler.model.records import AllocationEvent, State


class SupersededError(Exception):
    """A newer scheduler has opened the store; this one may not commit any more."""


class Store(Protocol):
    """Holds the state and the audit log.

    Every scheduler opens the store with a new incarnation. Only the newest may commit, so a
    scheduler that was frozen while another took over cannot assign anything.
    """

    async def open(self) -> int:
        """Take the store over; returns an incarnation greater than all earlier ones."""
        ...

    async def is_newest(self, incarnation: int) -> bool:
        """Whether no other scheduler opened the store since."""
        ...

    async def load(self) -> State:
        """The state as last committed."""
        ...

    async def commit(
        self, incarnation: int, before: State, after: State, events: Sequence[AllocationEvent]
    ) -> None:
        """Replace `before` by `after` and append `events`, atomically; old events may be deleted.

        Raises:
            SupersededError: `incarnation` is not the newest.
            ServiceError: UNAVAILABLE; the commit may or may not have happened, so load again.
        """
        ...

    async def events(self, after: int, limit: int) -> list[AllocationEvent]:
        """The oldest `limit` kept events with a greater sequence than `after`."""
        ...

    async def reachable(self) -> bool:
        """True when the store answers."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...
