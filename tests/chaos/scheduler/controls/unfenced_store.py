"""A scheduler that another one cannot replace.

A negative control: it serves as `python -m scheduler` does, on a store that takes every commit for
one of the newest scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

from redis.asyncio import Redis

from scheduler import cli
from scheduler.model.records import AllocationEvent, State
from scheduler.store import redis_store
from scheduler.store.redis_store import RedisStore


class UnfencedStore(RedisStore):
    """Believes every scheduler to be the newest."""

    def __init__(self, redis: Redis, max_events: int) -> None:
        super().__init__(redis, max_events)
        self._counters = redis

    async def is_newest(self, incarnation: int) -> bool:
        """Always."""
        return True

    async def commit(
        self, incarnation: int, before: State, after: State, events: Sequence[AllocationEvent]
    ) -> None:
        """See `Store.commit`, without the fence."""
        newest = int(await self._counters.hget(redis_store.COUNTERS, "incarnation") or 0)
        await super().commit(newest, before, after, events)


if __name__ == "__main__":
    # The process has no setting for this on purpose.
    vars(cli)["RedisStore"] = UnfencedStore
    cli.main()
