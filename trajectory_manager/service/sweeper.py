"""Sweeps of all runs: what a killed agent or process left behind is completed.

A run in which nothing happens is swept ever less often, up to 16 times: thousands of ended or
forgotten runs cost next to nothing. What this process records of a run makes it due again; what
another one records, that one sweeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from seamflow.trajectory.v1.sample_service_pb2 import Readiness
from seamflow.trajectory.v1.trajectory_service_pb2 import DeleteTrajectoriesResponse

from services.chassis.errors import ServiceError
from services.chassis.log import get_logger
from services.chassis.steady_clock import SteadyClock
from trajectory_manager.model.records import Rollout, RolloutState
from trajectory_manager.service import metrics
from trajectory_manager.service.rollouts import UNFINISHED, Rollouts
from trajectory_manager.store.redis.connect import Store
from trajectory_manager.store.redis.retention_store import Erased

_SWEEP_GROUPS = 128


class Retention:
    """Deletes rollouts that no step needs, and keeps the count of a run's stored tokens.

    A rollout is needed while its group is running, incomplete, ready or leased, while it may be
    replayed or a leased step replays it, and until it is settled. Rollouts are deleted before the
    record of their group, so that the next sweep completes an interrupted one.
    """

    def __init__(self, store: Store) -> None:
        self._store = store.retention
        self._runs = store.runs
        self._inspection = store.inspection

    async def delete(self, run_id: str, rollout_ids: Sequence[str]) -> DeleteTrajectoriesResponse:
        """Delete the finished rollouts among `rollout_ids` that are not needed. Idempotent.

        Raises:
            ServiceError: NOT_FOUND (run).
        """
        asked = list(dict.fromkeys(rollout_ids))
        needed = await self._store.needed(run_id, asked)
        free = [name for name in asked if name not in needed]
        erased = dict(zip(free, await self._delete(run_id, free), strict=True))
        needed |= {name for name, one in erased.items() if one.running}
        return DeleteTrajectoriesResponse(
            num_deleted=sum(one.existed and not one.running for one in erased.values()),
            needed_rollout_ids=[name for name in asked if name in needed],
        )

    async def sweep(self, run_id: str) -> int:
        """Delete the rollouts of groups that are past retention_steps; return how many groups."""
        due = await self._store.due(run_id, _SWEEP_GROUPS)
        names = [name for group in due for name in group.rollout_ids]
        erased = dict(zip(names, await self._delete(run_id, names), strict=True))
        # A surplus rollout of the group may still run until its lease is swept.
        done = [g for g in due if not any(erased[name].running for name in g.rollout_ids)]
        await self._store.forget(run_id, done)
        return len(done)

    async def _delete(self, run_id: str, rollout_ids: Sequence[str]) -> list[Erased]:
        erased = await self._store.delete(run_id, rollout_ids)
        gone = zip(rollout_ids, erased, strict=True)
        await self._inspection.forget(run_id, [name for name, one in gone if not one.running])
        num_tokens = sum(one.num_tokens for one in erased)
        if num_tokens:
            await self._runs.add_stored_tokens(run_id, -num_tokens)
        return erased


_MAX_PAUSE = 16
"""Sweeps after which an idle run is swept again."""
_UNLEASED_SECONDS = 30.0
_UNLEASED_BATCH = 256


@dataclass(slots=True)
class _Swept:
    """What is known of a run."""

    counts: Readiness | None = None
    pause: int = 0
    due: int = 0
    start: int = 0
    """Place in the list of its rollouts where the next look for unfinished ones begins."""
    next_look: float = field(default=0.0)


class Sweeper:
    """Sweeps runs, the busy ones every time."""

    def __init__(
        self,
        store: Store,
        rollouts: Rollouts,
        unleased_seconds: float = 0.0,
        clock: Callable[[], float] | None = None,
        *,
        max_indexed: int = 0,
    ) -> None:
        """Sweeps of a store.

        Args:
            store: with the runs.
            rollouts: settles them.
            unleased_seconds: after their start rollouts without a lease fail; 0: never.
            clock: Unix seconds.
            max_indexed: rollouts of a run that keep a row of the index; 0: there is none.
        """
        self._store = store
        self._rollouts = rollouts
        self._retention = Retention(store)
        self._unleased_seconds = unleased_seconds
        self._clock = clock or SteadyClock()
        self._max_indexed = max_indexed
        self._runs: dict[str, _Swept] = {}
        self._number = 0
        self._has_changed = True  # since the counts were published

    async def sweep(self) -> None:
        """Sweep every run that is due once; an unavailable store is retried at the next sweep."""
        try:
            run_ids = await self._store.runs.run_ids()
        except ServiceError as error:
            get_logger().warning("sweep_failed", reason=error.reason, error=error.message)
            return
        self._number += 1
        known, self._runs = self._runs, {n: self._runs.get(n) or _Swept() for n in run_ids}
        self._has_changed = self._has_changed or known.keys() != self._runs.keys()
        active = self._rollouts.take_active()
        for run_id, swept in self._runs.items():
            if run_id in active or swept.due <= self._number:
                await self._sweep_safely(run_id, swept)
        if self._has_changed:
            self._publish()

    async def _sweep_safely(self, run_id: str, swept: _Swept) -> None:
        try:
            await self._sweep_run(run_id, swept)
        except ServiceError as error:
            # The other runs are swept all the same.
            get_logger().warning("sweep_failed", run_id=run_id, error=error.message)
        except Exception as error:  # such as a damaged record
            get_logger().error("sweep_failed", run_id=run_id, exc_info=error)

    async def _sweep_run(self, run_id: str, swept: _Swept) -> None:
        num_done = await self._rollouts.sweep(run_id)
        num_done += await self._retention.sweep(run_id)
        num_done += await self._end_unleased(run_id, swept)
        if self._max_indexed:
            await self._store.inspection.trim(run_id, self._max_indexed)
        before, swept.counts = swept.counts, await self._store.runs.run_counts(run_id)
        self._has_changed = self._has_changed or swept.counts != before
        is_idle = not num_done and swept.counts == before and not swept.counts.num_running_rollouts
        swept.pause = min(max(2 * swept.pause, 1), _MAX_PAUSE) if is_idle else 0
        swept.due = self._number + max(swept.pause, 1)

    async def _end_unleased(self, run_id: str, swept: _Swept) -> int:
        """Fail rollouts without a lease that nobody has finished; returns how many."""
        now = self._clock()
        if not self._unleased_seconds or now < swept.next_look:
            return 0
        swept.next_look = now + min(_UNLEASED_SECONDS, self._unleased_seconds)
        names = await self._store.runs.listed(run_id, swept.start, _UNLEASED_BATCH)
        swept.start = swept.start + len(names) if len(names) == _UNLEASED_BATCH else 0
        found = [await self._store.tokens.rollout(run_id, name) for name in names]
        left = [each.rollout_id for each in found if each is not None and self._is_left(each, now)]
        await self._rollouts.fail(run_id, left, UNFINISHED)
        return len(left)

    def _is_left(self, rollout: Rollout, now: float) -> bool:
        is_running = rollout.state is RolloutState.RUNNING and not rollout.group_id
        return is_running and now - rollout.create_time > self._unleased_seconds

    def _publish(self) -> None:
        self._has_changed = False
        counts = [swept.counts for swept in self._runs.values() if swept.counts is not None]
        for stage in metrics.STAGES:
            metrics.DEPTH.labels(stage).set(sum(getattr(each, f"num_{stage}") for each in counts))
        metrics.STORED.set(sum(each.num_stored_tokens for each in counts))
