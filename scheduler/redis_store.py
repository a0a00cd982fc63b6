"""`Store` in Redis: the scheduler may be killed at any moment, running assignments stay."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from scheduler import codec, keys
from scheduler.records import AllocationEvent, State
from scheduler.store import SupersededError
from services.chassis.redis import store_errors
from services.chassis.redis_pipeline import Pipelines
from services.chassis.redis_scripts import Scripts

__all__ = ["RedisStore"]

_COUNTERS = ("last_epoch", "last_arrival", "last_sequence")


class RedisStore:
    """One Lua file for the write; a commit sends only what changed.

    Args:
        redis: client that answers bytes; owned from now on.
        max_events: entries the audit log keeps.
    """

    def __init__(self, redis: Redis, max_events: int) -> None:
        self._redis = redis
        self._max_events = max_events
        self._pipelines = Pipelines(redis)
        self._scripts = Scripts(self._pipelines, Path(__file__).parent / "lua")

    async def open(self) -> int:
        """See `Store.open`."""
        with store_errors("open"):
            return int(await self._redis.hincrby(keys.COUNTERS, "incarnation", 1))

    async def is_newest(self, incarnation: int) -> bool:
        """See `Store.is_newest`."""
        with store_errors("is_newest"):
            newest = await self._redis.hget(keys.COUNTERS, "incarnation")
        return int(newest or 0) == incarnation

    async def load(self) -> State:
        """See `Store.load`."""
        with store_errors("load"):
            async with self._redis.pipeline(transaction=True) as pipeline:
                pipeline.hmget(keys.COUNTERS, _COUNTERS)
                pipeline.hvals(keys.NODES)
                pipeline.hvals(keys.GANGS)
                counters, nodes, gangs = await pipeline.execute()
        return State(
            nodes={node.node_id: node for node in map(codec.decode_node, nodes)},
            gangs={gang.key: gang for gang in map(codec.decode_gang, gangs)},
            **{name: int(value or 0) for name, value in zip(_COUNTERS, counters, strict=True)},
        )

    async def commit(
        self, incarnation: int, before: State, after: State, events: Sequence[AllocationEvent]
    ) -> None:
        """See `Store.commit`."""
        committed = await self._scripts.call(
            "commit",
            keys=[keys.COUNTERS, keys.NODES, keys.GANGS, keys.EVENTS],
            args=[incarnation, self._max_events, _changes(before, after, events)],
        )
        if not committed:
            raise SupersededError

    async def events(self, after: int, limit: int) -> list[AllocationEvent]:
        """See `Store.events`."""
        with store_errors("events"):
            found: Any = await self._redis.zrangebyscore(
                keys.EVENTS, f"({after}", "+inf", start=0, num=limit
            )
        return [codec.decode_event(entry) for entry in found]

    async def reachable(self) -> bool:
        """See `Store.reachable`."""
        try:
            return bool(await self._redis.ping())
        except RedisError:
            return False

    async def close(self) -> None:
        """See `Store.close`."""
        await self._pipelines.aclose()
        await self._redis.aclose()


def _changes(before: State, after: State, events: Sequence[AllocationEvent]) -> str:
    """The argument of `commit.lua`; numbers travel as text, which Lua cannot round."""
    changes: dict[str, list[str]] = {"counters": [], "nodes": [], "gangs": [], "events": []}
    for name in _COUNTERS:
        changes["counters"] += [name, str(getattr(after, name))]
    for node_id, node in after.nodes.items():
        if before.nodes.get(node_id) != node:
            changes["nodes"] += [node_id, codec.encode(node)]
    for key, gang in after.gangs.items():
        if before.gangs.get(key) != gang:
            changes["gangs"] += [codec.encode_key(key), codec.encode(gang)]
    for event in events:
        changes["events"] += [str(event.sequence), codec.encode(event)]
    changes["released"] = [codec.encode_key(key) for key in before.gangs if key not in after.gangs]
    return json.dumps(changes)
