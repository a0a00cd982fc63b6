"""In-memory InspectionStore: the reference the Redis one is tested against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.lib.trajectory_manager.memory.run_state import Runs, RunState
from trajectory_manager.model.records import RolloutSummary, SlotName
from trajectory_manager.store.errors import store_error
from trajectory_manager.store.redis.inspection_store import (
    IndexPage,
    InspectionStore,
    Row,
    TrainedRecord,
)


class MemoryInspectionStore(InspectionStore):
    """Implements `InspectionStore`; nothing survives the process."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    async def newest(self, run_id: str, before: int, limit: int) -> IndexPage:
        """See `InspectionStore`."""
        run = self._runs.get(run_id)
        numbered = list(enumerate(run.listed, 1))[run.rows_floor : before - 1 if before else None]
        rows = [run.row(number, name) for number, name in reversed(numbered)]
        return IndexPage(
            rows=rows[:limit], num_started=len(run.listed), num_unindexed=run.rows_floor
        )

    async def rows(self, run_id: str, rollout_ids: Sequence[str]) -> list[Row]:
        """See `InspectionStore`."""
        run = self._runs.get(run_id)
        return [run.row(0, name) for name in rollout_ids]

    async def keep(self, run_id: str, summaries: Mapping[str, RolloutSummary | None]) -> None:
        """See `InspectionStore`."""
        run = self._runs.get(run_id)
        for name, summary in summaries.items():
            if summary is not None or name not in run.leases:
                run.keep_row(name, summary)

    async def forget(self, run_id: str, rollout_ids: Sequence[str]) -> None:
        """See `InspectionStore`."""
        run = self._runs.get(run_id)
        for name in rollout_ids:
            run.rows.pop(name, None)
            run.keep_row(name, None)

    async def trim(self, run_id: str, max_rollouts: int) -> None:
        """See `InspectionStore`."""
        run = self._runs.get(run_id)
        run.rows_floor = max(run.rows_floor, len(run.listed) - max_rollouts)
        for name in list(run.listed)[: run.rows_floor]:
            run.rows.pop(name, None)

    async def of_group(self, run_id: str, group_id: str) -> list[str]:
        """See `InspectionStore`."""
        run = self._runs.get(run_id)
        names = ((name, SlotName.parse(name)) for name in run.listed)
        found = [name for name, slot in names if slot and slot.task_id == group_id]
        return found[::-1] if group_id in run.seen else []

    async def of_step(self, run_id: str, step: int) -> list[str]:
        """See `InspectionStore`."""
        run = self._runs.get(run_id)
        names = sorted(run.recorded.get(step, ({}, 0))[0]) or _leased(run, step)
        rollouts = [name.partition("#")[0] for name in names]
        return list(dict.fromkeys(rollouts or _committed(run, step)))

    async def record_trained(
        self,
        run_id: str,
        epoch: int,
        step: int,
        records: Sequence[TrainedRecord],
        num_kept_steps: int,
    ) -> None:
        """See `InspectionStore`."""
        run = self._runs.get(run_id)
        if epoch != run.epoch:
            raise store_error("STALE_TRAINER", run_id, epoch, run.epoch)
        known, owner = run.recorded.get(step, ({}, epoch))
        samples = known if owner == epoch else {}
        run.recorded[step] = samples | {each.sample_id: each for each in records}, epoch
        for each in records:
            name = each.sample_id.partition("#")[0]
            if (row := run.rows.get(name)) is not None:
                run.rows[name] = row._replace(step=step)
        for number, (_, owner) in list(run.recorded.items()):
            if number <= step - num_kept_steps or (number > step and owner != epoch):
                del run.recorded[number]

    async def trained_steps(self, run_id: str) -> list[int]:
        """See `InspectionStore`."""
        return sorted(self._runs.get(run_id).recorded)

    async def trained_samples(self, run_id: str, step: int) -> list[str]:
        """See `InspectionStore`."""
        return sorted(self._runs.get(run_id).recorded.get(step, ({}, 0))[0])

    async def trained(
        self, run_id: str, step: int, sample_ids: Sequence[str], *, with_tokens: bool
    ) -> list[TrainedRecord]:
        """See `InspectionStore`."""
        found = self._runs.get(run_id).recorded.get(step, ({}, 0))[0]
        return [
            TrainedRecord(
                sample_id=name,
                summary=found[name].summary,
                tokens=found[name].tokens if with_tokens else b"",
            )
            for name in sample_ids
            if name in found
        ]


def _leased(run: RunState, step: int) -> list[str]:
    entry = run.ledger.get(step)
    return [*entry.lease.sample_ids, *entry.lease.replayed_ids] if entry else []


def _committed(run: RunState, step: int) -> list[str]:
    """The trained rollouts of the groups that a step committed."""
    return [
        str(SlotName(group[0], slot, attempt))
        for group in sorted(run.trained.get(step, ()))
        if run.steps.get(group[0], (0, ()))[0] == step
        for slot, attempt in enumerate(run.steps[group[0]][1])
        if attempt
    ]
