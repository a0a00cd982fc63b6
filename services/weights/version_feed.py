"""Change feed of versions: this replica's immediately, other replicas' by one shared poll."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from seamflow.weights.v1.weight_service_pb2 import Manifest, WeightFile

from services.chassis.errors import Reason, ServiceError, unavailable
from services.chassis.log import get_logger
from services.weights.keys import Allocation, Scope
from services.weights.redis_store import RedisStore


@dataclass(slots=True)
class _Watched:
    newest: int = 0
    watchers: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class VersionFeed:
    """Watchers wait in memory; one read per interval and scope serves them all."""

    def __init__(self, store: RedisStore, poll_seconds: float) -> None:
        self._store = store
        self._poll_seconds = poll_seconds
        self._watched: dict[Scope, _Watched] = {}
        self._closed = False

    async def newer(
        self, scope: Scope, after: int, also: Callable[[], bool] = lambda: False
    ) -> int:
        """Wait for a committed version above `after`, or for `also`; returns the newest version.

        `also` is asked again at each `wake`.

        Raises:
            ServiceError: UNAVAILABLE once the process drains.
        """
        with self._watch(scope) as watched:
            self.announce(scope, await self._store.newest(scope))
            while watched.newest <= after and not also():
                if self._closed:
                    raise unavailable(Reason.DRAINING, "this replica is draining; watch another")
                await watched.changed.wait()
            return watched.newest

    def announce(self, scope: Scope, version: int) -> None:
        """Wake the watchers of `scope` if `version` is newer than the newest known one."""
        watched = self._watched.get(scope)
        if watched is not None and version > watched.newest:
            watched.newest = version
            _wake(watched)

    def wake(self, scope: Scope) -> None:
        """Have the watchers of `scope` look again."""
        if watched := self._watched.get(scope):
            _wake(watched)

    async def poll(self) -> None:
        """Poll for other replicas' commits until cancelled."""
        while True:
            await asyncio.sleep(self._poll_seconds)
            try:
                for scope in list(self._watched):
                    self.announce(scope, await self._store.newest(scope))
            except ServiceError as error:
                # Watchers miss nothing: they get the newest version once the store is available.
                get_logger().warning("poll_failed", reason=error.reason, detail=error.message)

    async def close(self) -> None:
        """End all watches with UNAVAILABLE."""
        self._closed = True
        for watched in self._watched.values():
            _wake(watched)

    @contextmanager
    def _watch(self, scope: Scope) -> Iterator[_Watched]:
        watched = self._watched.setdefault(scope, _Watched())
        watched.watchers += 1
        try:
            yield watched
        finally:
            watched.watchers -= 1
            if not watched.watchers:
                del self._watched[scope]


def _wake(watched: _Watched) -> None:
    waiting, watched.changed = watched.changed, asyncio.Event()
    waiting.set()


_KEPT = 2
"""Versions of a model that are published at a time; older ones were given up by their trainer."""


class AnnouncedVersions:
    """Files announced to this replica, until their version or a newer one is committed."""

    def __init__(self) -> None:
        self._manifests: dict[Scope, dict[int, Manifest]] = {}

    def add(
        self, scope: Scope, version: int, allocation: Allocation, files: Sequence[WeightFile]
    ) -> None:
        """Add files to `version`; one of the same name takes the place of the earlier one."""
        versions = self._manifests.setdefault(scope, {})
        earlier = versions.get(version)
        by_name = {file.name: file for file in [*(earlier.files if earlier else ()), *files]}
        versions[version] = Manifest(
            run_id=scope.run_id,
            model=scope.model,
            weight_version=version,
            step=allocation.step,
            parent_weight_version=allocation.parent,
            files=by_name.values(),
        )
        for old in sorted(versions)[:-_KEPT]:
            del versions[old]

    def get(self, scope: Scope, version: int) -> Manifest | None:
        """The files of `version` so far; None: there are none. It is never changed."""
        return self._manifests.get(scope, {}).get(version)

    def newest(self, scope: Scope, above: int) -> Manifest | None:
        """The files so far of the newest version above `above`."""
        version = max(self._manifests.get(scope, ()), default=0)
        return self.get(scope, version) if version > above else None

    def forget(self, scope: Scope, committed: int) -> None:
        """Forget `committed` and older versions."""
        versions = self._manifests.pop(scope, {})
        if newer := {n: manifest for n, manifest in versions.items() if n > committed}:
            self._manifests[scope] = newer
