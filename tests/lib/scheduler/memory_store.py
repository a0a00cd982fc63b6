"""`Store` in this process's memory: for tests and one-machine runs; a restart forgets it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from scheduler.model.records import AllocationEvent, State
from scheduler.store.redis_store import RedisStore, SupersededError


class MemoryStore(RedisStore):
    """The reference implementation.

    Args:
        max_events: entries the audit log keeps.
    """

    def __init__(self, max_events: int) -> None:
        self._incarnation = 0
        self._state = State()
        self._events: deque[AllocationEvent] = deque(maxlen=max_events)

    async def open(self) -> int:
        """See `RedisStore.open`."""
        self._incarnation += 1
        return self._incarnation

    async def is_newest(self, incarnation: int) -> bool:
        """See `RedisStore.is_newest`."""
        return incarnation == self._incarnation

    async def load(self) -> State:
        """See `RedisStore.load`."""
        return self._state

    async def commit(
        self, incarnation: int, before: State, after: State, events: Sequence[AllocationEvent]
    ) -> None:
        """See `RedisStore.commit`."""
        if incarnation != self._incarnation:
            raise SupersededError
        self._state = after
        self._events.extend(events)

    async def events(self, after: int, limit: int) -> list[AllocationEvent]:
        """See `RedisStore.events`."""
        return [event for event in self._events if event.sequence > after][:limit]

    async def reachable(self) -> bool:
        """See `RedisStore.reachable`."""
        return True

    async def close(self) -> None:
        """See `RedisStore.close`."""
