"""Versions, their states, and the fence of the trainer, in Redis: shared by replicas, and durable.

A version goes `ALLOCATED -> COMMITTED -> FORGOTTEN`: `begin` allocates, `commit` makes it visible,
`forget` deletes it after enough newer commits. A version that is never committed remains a gap.
"""

from __future__ import annotations

from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError
from seamflow.weights.v1.weight_service_pb2 import Manifest

from services.chassis.errors import already_exists, not_found, stale_epoch
from services.chassis.redis.connect import store_errors
from services.chassis.redis.pipeline import Pipelines
from services.chassis.redis.scripts import Scripts
from services.weights import keys
from services.weights.keys import Allocation, Publish, Scope


class RedisStore:
    """One Lua file per write; reads are single commands.

    Every method is atomic and raises UNAVAILABLE while Redis is unavailable.
    """

    def __init__(self, redis: Redis) -> None:
        """Takes ownership of `redis`, a client that answers bytes."""
        self._redis = redis
        self._pipelines = Pipelines(redis, mark=keys.STORE)
        self._scripts = Scripts(self._pipelines, Path(__file__).parent / "lua")

    async def begin(self, scope: Scope, publish: Publish, floor: int) -> int:
        """Allocate a version above `floor` and above every earlier one; same key, same version.

        Raises:
            ServiceError: ABORTED (stale epoch), ALREADY_EXISTS (the key is in use with another step
                or parent).
        """
        status, *rest = await self._scripts.call(
            "begin",
            keys=[keys.counters(scope), keys.publishes(scope), keys.allocations(scope)],
            args=[publish.epoch, publish.key, f"{publish.step}:{publish.parent}", floor],
        )
        if status == b"stale":
            raise stale_epoch(f"run {scope.run_id}", publish.epoch, int(rest[0]))
        if status == b"conflict":
            raise already_exists("publish", publish.key)
        return int(rest[0])

    async def allocation(self, scope: Scope, version: int) -> Allocation | None:
        """The allocation of `version`; None: it was never allocated, or it is forgotten."""
        record = await self._read(keys.allocations(scope), str(version))
        if record is None:
            return None
        step, parent = record.split(b":")[:2]  # a newer release may add to it
        return Allocation(step=int(step), parent=int(parent))

    async def fence(self, scope: Scope, epoch: int, version: int) -> None:
        """Check that `epoch` is not stale and `version` is allocated.

        Raises:
            ServiceError: ABORTED (stale epoch), NOT_FOUND (never allocated, or forgotten).
        """
        status, *rest = await self._scripts.call(
            "fence", keys=[keys.counters(scope), keys.allocations(scope)], args=[epoch, version]
        )
        if status == b"stale":
            raise stale_epoch(f"run {scope.run_id}", epoch, int(rest[0]))
        if status == b"missing":
            raise not_found("weight_version", str(version))

    async def commit(self, scope: Scope, epoch: int, manifest: Manifest) -> Manifest:
        """Commit the manifest; returns the committed one, which may be an earlier one.

        Raises:
            ServiceError: ABORTED (stale epoch), NOT_FOUND (never allocated).
        """
        status, *rest = await self._scripts.call(
            "commit",
            keys=[keys.counters(scope), keys.allocations(scope), keys.manifests(scope)],
            args=[epoch, manifest.weight_version, manifest.SerializeToString()],
        )
        if status == b"stale":
            raise stale_epoch(f"run {scope.run_id}", epoch, int(rest[0]))
        if status == b"missing":
            raise not_found("weight_version", str(manifest.weight_version))
        return Manifest.FromString(rest[0])

    async def manifest(self, scope: Scope, version: int) -> Manifest | None:
        record = await self._read(keys.manifests(scope), str(version))
        return None if record is None else Manifest.FromString(record)

    async def newest(self, scope: Scope) -> int:
        """The newest committed version; 0 for none."""
        return int(await self._read(keys.counters(scope), "newest") or 0)

    async def forget(self, scope: Scope, keep: int) -> int:
        """Delete all below the newest `keep` committed versions; returns the oldest one kept."""
        oldest: int = await self._scripts.call(
            "forget",
            keys=[keys.publishes(scope), keys.allocations(scope), keys.manifests(scope)],
            args=[keep],
        )
        return oldest

    async def join(self, scope: Scope, group: str, member: str, *, ttl: float) -> None:
        """Add `member` to `group` for `ttl` seconds; a repeated call extends the membership."""
        await self._scripts.call(
            "join", keys=[keys.members(scope, group)], args=[member, round(ttl * 1000)]
        )

    async def members(self, scope: Scope, group: str) -> list[str]:
        found = await self._scripts.call("members", keys=[keys.members(scope, group)], args=[])
        return sorted(member.decode() for member in found)

    async def leave(self, scope: Scope, group: str, member: str) -> None:
        """Remove a member. Idempotent."""
        with store_errors("write weights"):
            await self._redis.zrem(keys.members(scope, group), member)

    async def reachable(self) -> bool:
        """Whether Redis answers a PING, and has its data."""
        try:
            return bool(await self._redis.ping()) and not self._pipelines.has_lost_data
        except RedisError:
            return False

    async def close(self) -> None:
        await self._pipelines.aclose()
        await self._redis.aclose()

    async def _read(self, key: str, field: str) -> bytes | None:
        record: bytes | None
        (record,) = await self._scripts.read([("HGET", key, field)])
        return record
