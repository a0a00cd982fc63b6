"""The scheduler's store in Redis. Assignments survive a crash of the scheduler at any time.

Records are JSON. Readers ignore unknown fields and use defaults for missing ones, so records of
older and newer schedulers can be read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter
from redis.asyncio import Redis
from redis.exceptions import RedisError

from scheduler.model.lending_state import LendingState
from scheduler.model.records import (
    AllocationEvent,
    Gang,
    GangKey,
    Node,
    RunPolicy,
    State,
    Tail,
)
from scheduler.model.stage_balance import StageBalance
from services.chassis.redis.connect import store_errors
from services.chassis.redis.pipeline import Pipelines
from services.chassis.redis.scripts import Scripts

COUNTERS = "sf:scheduler:{pool}:counters"
"""Hash: `incarnation`, and the `last_*` counters of the state."""
NODES = "sf:scheduler:{pool}:nodes"
"""Hash: node_id -> JSON."""
GANGS = "sf:scheduler:{pool}:gangs"
"""Hash: [run_id, gang_id] as JSON -> JSON."""
RUNS = "sf:scheduler:{pool}:runs"
"""Hash: run_id -> its policy as JSON."""
LENDINGS = "sf:scheduler:{pool}:lendings"
"""Hash: [run_id, gang_id] as JSON -> its lending measurements as JSON."""
BALANCES = "sf:scheduler:{pool}:balances"
"""Hash: [run_id, gang_id] as JSON -> its stage times and advice as JSON."""
TAILS = "sf:scheduler:{pool}:tails"
"""Hash: [run_id, gang_id] as JSON -> when it begins with its next batch as JSON."""
EVENTS = "sf:scheduler:{pool}:events"
"""Sorted set: JSON by sequence."""
STORE = "sf:scheduler:{pool}:store"
"""String: marks the store, to notice one that has come back empty."""


_reader: Any = cache(TypeAdapter)
Record = TypeVar("Record", Node, Gang, RunPolicy, LendingState, StageBalance, Tail, AllocationEvent)
_COUNTERS = ("last_epoch", "last_arrival", "last_sequence")
_HASHES = (NODES, GANGS, RUNS, LENDINGS, BALANCES, TAILS)


class SupersededError(Exception):
    """A newer scheduler has opened the store; this one may not commit any more."""


class RedisStore:
    """Holds the state and the audit log.

    Every scheduler opens the store with a new incarnation. Only the newest may commit, so a
    scheduler that was frozen while another took over cannot assign anything.

    Args:
        redis: client that returns bytes; owned by this store.
        max_events: maximum size of the audit log.
    """

    def __init__(self, redis: Redis, max_events: int) -> None:
        self._redis = redis
        self._max_events = max_events
        self._pipelines = Pipelines(redis, mark=STORE)
        self._scripts = Scripts(self._pipelines, Path(__file__).parent / "lua")

    async def open(self) -> int:
        """Take the store over; returns an incarnation greater than all earlier ones."""
        (number,) = await self._scripts.read([("HINCRBY", COUNTERS, "incarnation", 1)])
        return int(number)

    async def is_newest(self, incarnation: int) -> bool:
        """Whether no other scheduler opened the store since."""
        (newest,) = await self._scripts.read([("HGET", COUNTERS, "incarnation")])
        return int(newest or 0) == incarnation

    async def load(self) -> State:
        with store_errors("load"):
            async with self._redis.pipeline(transaction=True) as pipeline:
                pipeline.hmget(COUNTERS, _COUNTERS)
                for key in _HASHES:
                    pipeline.hgetall(key)
                counters, nodes, gangs, runs, lendings, balances, tails = await pipeline.execute()
        return State(
            nodes={name.decode(): decode(Node, node) for name, node in nodes.items()},
            gangs={decode_key(key): decode(Gang, gang) for key, gang in gangs.items()},
            runs={name.decode(): decode(RunPolicy, run) for name, run in runs.items()},
            lendings={
                decode_key(key): decode(LendingState, lending) for key, lending in lendings.items()
            },
            balances={
                decode_key(key): decode(StageBalance, balance) for key, balance in balances.items()
            },
            tails={decode_key(key): decode(Tail, tail) for key, tail in tails.items()},
            **{name: int(value or 0) for name, value in zip(_COUNTERS, counters, strict=True)},
        )

    async def commit(
        self, incarnation: int, before: State, after: State, events: Sequence[AllocationEvent]
    ) -> None:
        """Replace `before` by `after` and append `events`, atomically; old events may be deleted.

        Raises:
            SupersededError: `incarnation` is not the newest.
            ServiceError: UNAVAILABLE; the commit may or may not have happened, so load again.
        """
        committed = await self._scripts.call(
            "commit",
            keys=[COUNTERS, EVENTS, *_HASHES],
            args=[incarnation, self._max_events, _changes(before, after, events)],
        )
        if not committed:
            raise SupersededError

    async def events(self, after: int, limit: int) -> list[AllocationEvent]:
        """The oldest `limit` kept events with a greater sequence than `after`."""
        with store_errors("events"):
            found: Any = await self._redis.zrangebyscore(
                EVENTS, f"({after}", "+inf", start=0, num=limit
            )
        return [decode(AllocationEvent, entry) for entry in found]

    async def reachable(self) -> bool:
        try:
            return bool(await self._redis.ping()) and not self._pipelines.has_lost_data
        except RedisError:
            return False

    async def close(self) -> None:
        await self._pipelines.aclose()
        await self._redis.aclose()


def _changes(before: State, after: State, events: Sequence[AllocationEvent]) -> str:
    """The argument of `commit.lua`; numbers travel as text, which Lua cannot round."""
    counters = chain.from_iterable((name, str(getattr(after, name))) for name in _COUNTERS)
    logged = chain.from_iterable((str(event.sequence), encode(event)) for event in events)
    hashes = [
        _difference(before.nodes, after.nodes, str),
        _difference(before.gangs, after.gangs, encode_key),
        _difference(before.runs, after.runs, str),
        _difference(before.lendings, after.lendings, encode_key),
        _difference(before.balances, after.balances, encode_key),
        _difference(before.tails, after.tails, encode_key),
    ]
    changes = {"counters": list(counters), "events": list(logged), "hashes": hashes}
    return json.dumps(changes)


def _difference(
    before: Mapping[Any, Any], after: Mapping[Any, Any], field: Callable[[Any], str]
) -> dict[str, list[str]]:
    """The fields of a hash to set and to remove."""
    changed: list[str] = []
    for key, record in after.items():
        known = before.get(key)
        if known is not record and known != record:
            changed += (field(key), encode(record))
    return {"set": changed, "removed": [field(key) for key in before if key not in after]}


def encode(
    record: Node | Gang | RunPolicy | LendingState | StageBalance | Tail | AllocationEvent,
) -> str:
    """One line of JSON."""
    content = asdict(record)
    for node in (content, content.get("node") or {}):
        node.pop("report", None)  # kept in memory only
    return json.dumps(content, separators=(",", ":"))


def decode(kind: type[Record], text: bytes) -> Record:
    found: Record = _reader(kind).validate_python(json.loads(text))
    return found


def encode_key(key: GangKey) -> str:
    return json.dumps(key)


def decode_key(text: bytes) -> GangKey:
    run_id, gang_id = json.loads(text)
    return run_id, gang_id
