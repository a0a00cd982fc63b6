"""The reference implementation of `RedisStore`, for tests and for runs on one machine."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from seamflow.weights.v1.weight_service_pb2 import Manifest

from services.chassis.errors import already_exists, not_found, stale_epoch
from services.weights.keys import Allocation, Publish, Scope
from services.weights.redis_store import RedisStore


@dataclass(slots=True)
class _Versions:
    """State of one scope."""

    allocated: int = 0
    epoch: int = 0
    keys: dict[str, int] = field(default_factory=dict)
    allocations: dict[int, Allocation] = field(default_factory=dict)
    manifests: dict[int, Manifest] = field(default_factory=dict)
    groups: defaultdict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))

    def fence(self, scope: Scope, epoch: int) -> None:
        if epoch < self.epoch:
            raise stale_epoch(f"run {scope.run_id}", epoch, self.epoch)
        self.epoch = epoch


class MemoryStore:
    """Keeps everything in dicts; atomic because no method awaits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives monotonic seconds, for memberships."""
        self._clock = clock
        self._scopes: dict[Scope, _Versions] = {}

    def _of(self, scope: Scope) -> _Versions:
        return self._scopes.get(scope, _Versions())

    async def begin(self, scope: Scope, publish: Publish, floor: int) -> int:
        """See `RedisStore.begin`."""
        versions = self._scopes.setdefault(scope, _Versions())
        versions.fence(scope, publish.epoch)
        allocation = Allocation(step=publish.step, parent=publish.parent)
        if known := versions.keys.get(publish.key):
            if versions.allocations[known] != allocation:
                raise already_exists("publish", publish.key)
            return known
        version = versions.allocated = max(versions.allocated, floor) + 1
        versions.keys[publish.key] = version
        versions.allocations[version] = allocation
        return version

    async def allocation(self, scope: Scope, version: int) -> Allocation | None:
        """See `RedisStore.allocation`."""
        return self._of(scope).allocations.get(version)

    async def fence(self, scope: Scope, epoch: int, version: int) -> None:
        """See `RedisStore.fence`."""
        versions = self._of(scope)
        if epoch < versions.epoch:
            raise stale_epoch(f"run {scope.run_id}", epoch, versions.epoch)
        if version not in versions.allocations:
            raise not_found("weight_version", str(version))

    async def commit(self, scope: Scope, epoch: int, manifest: Manifest) -> Manifest:
        """See `RedisStore.commit`."""
        versions, version = self._scopes.setdefault(scope, _Versions()), manifest.weight_version
        versions.fence(scope, epoch)
        if version not in versions.allocations:
            raise not_found("weight_version", str(version))
        return versions.manifests.setdefault(version, manifest)

    async def manifest(self, scope: Scope, version: int) -> Manifest | None:
        """See `RedisStore.manifest`."""
        return self._of(scope).manifests.get(version)

    async def newest(self, scope: Scope) -> int:
        """See `RedisStore.newest`."""
        return max(self._of(scope).manifests, default=0)

    async def forget(self, scope: Scope, keep: int) -> int:
        """See `RedisStore.forget`."""
        versions = self._of(scope)
        oldest = min(sorted(versions.manifests)[-keep:], default=0)
        for version in [old for old in versions.allocations if old < oldest]:
            del versions.allocations[version]
            versions.manifests.pop(version, None)
        versions.keys = {key: kept for key, kept in versions.keys.items() if kept >= oldest}
        return oldest

    async def join(self, scope: Scope, group: str, member: str, *, ttl: float) -> None:
        """See `RedisStore.join`."""
        self._live(scope, group)[member] = self._clock() + ttl

    async def members(self, scope: Scope, group: str) -> list[str]:
        """See `RedisStore.members`."""
        return sorted(self._live(scope, group))

    async def leave(self, scope: Scope, group: str, member: str) -> None:
        """See `RedisStore.leave`."""
        self._live(scope, group).pop(member, None)

    def _live(self, scope: Scope, group: str) -> dict[str, float]:
        members = self._scopes.setdefault(scope, _Versions()).groups[group]
        for member in [gone for gone, until in members.items() if until <= self._clock()]:
            del members[member]
        return members

    async def reachable(self) -> bool:
        """Always."""
        return True

    async def close(self) -> None:
        """Nothing to let go of."""


def memory_store() -> RedisStore:
    """A store that takes the place of Redis."""
    return cast("RedisStore", MemoryStore())
