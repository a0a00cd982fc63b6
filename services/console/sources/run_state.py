"""The state of a run's services, cached for a short time and read on request."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import grpc.aio
from seamflow.durations import seconds_of
from seamflow.errors import NotFoundError, SeamflowError
from seamflow.inspect.endpoints import Endpoints
from seamflow.inspect.failure_causes import Cause, causes
from seamflow.inspect.lives import Period, stops
from seamflow.inspect.snapshot import Snapshot, gather
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.console.sources.run_store import AllocationLog, RunStore
from services.console.sources.shown_runs import ShownRun

_NEWEST = 50
_KEPT = 200

_SECONDS = 5.0
_PATIENCE_SECONDS = 1.0
_SEARCH_SECONDS = 5.0
"""Between searches of the store for what runs and what failed: they look at many rollouts."""


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

    async def causes(self, cut: Sequence[Period] = ()) -> list[Cause]:
        """The most frequent first, among the newest 50 failures; see `failure_causes.causes`."""
        failed = trajectory_pb2.ROLLOUT_STATE_FAILED
        search = pb.SearchRolloutsRequest(state=failed, page_size=_NEWEST)
        names = [each.rollout_id for each in (await self._store.found(search)).rollouts]
        await asyncio.gather(*(self._add(name) for name in names if name not in self._read))
        return causes((self._read[n] for n in reversed(names) if n in self._read), cut)

    async def _add(self, name: str) -> None:
        try:
            self._read[name], _ = await self._store.headers(name)
        except NotFoundError:
            return  # deleted meanwhile
        while len(self._read) > _KEPT:
            self._read.popitem(last=False)


class RunState:
    """The newest snapshot of a live run; requests that come together share one."""

    def __init__(self, run: ShownRun, store: RunStore, seconds: float) -> None:
        self.run = run
        self.causes: list[Cause] = []
        """Why the newest rollouts that failed did, the most frequent cause first."""
        self._store = store
        self._log = AllocationLog(store)
        self._failed = FailedRollouts(store)
        self._seconds = seconds
        self._asking: asyncio.Task[None] | None = None
        self._asked = 0.0
        self._snapshot: Snapshot | None = None
        self._searched = float("-inf")
        self._oldest: trajectory_pb2.Trajectory | None = None

    async def snapshot(self) -> Snapshot:
        """Of now, or of a moment ago; the one before where services do not answer soon."""
        is_due = time.monotonic() - self._asked >= self._seconds
        if self._asking is None or (self._asking.done() and is_due):
            self._asked = time.monotonic()
            self._asking = asyncio.create_task(self._ask())
        if self._snapshot is None:
            await asyncio.shield(self._asking)
        else:
            await asyncio.wait([self._asking], timeout=_PATIENCE_SECONDS)
            if self._asking.done():
                self._asking.result()  # raises its error
        assert self._snapshot is not None
        return self._snapshot

    async def _ask(self) -> None:
        self._snapshot = await self._gathered()

    async def events(self) -> list[scheduler_pb.AllocationEvent]:
        """The scheduler's audit log, oldest first."""
        return await self._log.events()

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])
        await self._log.close()

    async def _gathered(self) -> Snapshot:
        snapshot = await gather(await self._endpoints())
        self._add_step(snapshot)
        return await self._with_history(snapshot)

    async def _endpoints(self) -> Endpoints:
        """With the trainer at the address that its node names, where none is configured."""
        endpoints = self.run.endpoints
        assert endpoints is not None
        if "trainer" in endpoints.services:
            return endpoints
        request = scheduler_pb.ListNodesRequest(run_id=self._store.run_id)
        nodes: Sequence[scheduler_pb.Node] = ()
        with suppress(grpc.aio.AioRpcError, SeamflowError):  # why-stuck says so
            nodes = (await self._store.scheduler.ListNodes(request, timeout=_SECONDS)).nodes
        workers = [(node.assignment.tag, worker) for node in nodes for worker in node.workers]
        found = [(tag != "train", each.address) for tag, each in workers if each.tag == "train"]
        if not found:
            return endpoints
        return replace(endpoints, services={**endpoints.services, "trainer": min(found)[1]})

    def _add_step(self, snapshot: Snapshot) -> None:
        """Where no metrics file is here, what the trainer says of its last step."""
        trainer, table = snapshot.trainer, self.run.steps
        if trainer is None or not trainer.metrics or table.has_file():
            return
        if not table.steps or trainer.step > table.steps[-1]:
            table.add({**trainer.metrics, "step": trainer.step, "time": snapshot.now})

    async def _with_history(self, snapshot: Snapshot) -> Snapshot:
        """With what why-stuck looks at besides: the audit log, the oldest rollout, failures."""
        try:
            _, events = await asyncio.gather(self._search(), self.events())
        except (SeamflowError, grpc.aio.AioRpcError):
            return snapshot  # its `problems` tell which service does not answer
        return replace(snapshot, events=tuple(events), oldest_rollout=self._oldest)

    async def _search(self) -> None:
        if time.monotonic() - self._searched < _SEARCH_SECONDS:
            return
        self._oldest, self.causes = await asyncio.gather(
            oldest_running(self._store), self._failed.causes(stops(self.run.lives()))
        )
        self._searched = time.monotonic()
