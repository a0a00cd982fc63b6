"""Change feed of versions: this replica's immediately, other replicas' by one shared poll."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from services.chassis.errors import Reason, ServiceError, unavailable
from services.chassis.log import get_logger
from services.weights.keys import Scope
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
