"""Rollouts that why a run waits may be seen from: those that run, and those that failed last."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from seamflow.durations import seconds_of
from seamflow.errors import NotFoundError
from seamflow.failure_causes import Cause, causes
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.console.sources.run_store import RunStore

_NEWEST = 50
_KEPT = 200


async def oldest_running(store: RunStore) -> trajectory_pb2.Trajectory | None:
    """Of the newest rollouts that one search looks at; without turns. None: none runs."""
    running = trajectory_pb2.ROLLOUT_STATE_RUNNING
    found = await store.found(pb.SearchRolloutsRequest(state=running, page_size=1000))
    if not found.rollouts:
        return None
    oldest = min(found.rollouts, key=lambda each: seconds_of(each.create_time))
    return trajectory_pb2.Trajectory(
        rollout_id=oldest.rollout_id, group_id=oldest.group_id, create_time=oldest.create_time
    )


class FailedRollouts:
    """Causes of the newest failures; the failure of a rollout is read once."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._read: OrderedDict[str, trajectory_pb2.Trajectory] = OrderedDict()

    async def causes(self) -> list[Cause]:
        """The most frequent first, among the newest 50 failures."""
        failed = trajectory_pb2.ROLLOUT_STATE_FAILED
        search = pb.SearchRolloutsRequest(state=failed, page_size=_NEWEST)
        names = [each.rollout_id for each in (await self._store.found(search)).rollouts]
        await asyncio.gather(*(self._add(name) for name in names if name not in self._read))
        return causes(self._read[name] for name in reversed(names) if name in self._read)

    async def _add(self, name: str) -> None:
        try:
            self._read[name] = await self._store.headers(name)
        except NotFoundError:
            return  # deleted meanwhile
        while len(self._read) > _KEPT:
            self._read.popitem(last=False)
