"""In-memory RetentionStore: the reference the Redis one is tested against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.lib.trajectory_manager.memory.column_store import MemoryColumnStore
from tests.lib.trajectory_manager.memory.run_state import Runs, RunState
from tests.lib.trajectory_manager.memory.token_store import MemoryTokenStore
from trajectory_manager.model.records import RolloutState, SlotName
from trajectory_manager.store.redis.column_store import rollout_of
from trajectory_manager.store.redis.retention_store import EndedGroup, Erased, RetentionStore


class MemoryRetentionStore(RetentionStore):
    """Implements `RetentionStore`; nothing survives the process."""

    def __init__(self, runs: Runs, tokens: MemoryTokenStore, columns: MemoryColumnStore) -> None:
        self._runs = runs
        self._tokens = tokens
        self._columns = columns

    async def needed(self, run_id: str, rollout_ids: Sequence[str]) -> set[str]:
        """See `RetentionStore`."""
        run = self._runs.get(run_id)
        held = run.groups.keys() | _replayable(run)
        return {
            rollout_id
            for rollout_id in rollout_ids
            if rollout_id in run.marks
            or ((name := SlotName.parse(rollout_id)) and name.task_id in held)
        }

    async def delete(self, run_id: str, rollout_ids: Sequence[str]) -> list[Erased]:
        """See `RetentionStore`."""
        return [await self._delete(run_id, name) for name in rollout_ids]

    async def _delete(self, run_id: str, rollout_id: str) -> Erased:
        rollout = await self._tokens.rollout(run_id, rollout_id)
        if rollout is None:
            return Erased(existed=False)
        if rollout.state is RolloutState.RUNNING:
            return Erased(existed=True, running=True)
        self._columns.forget(run_id, rollout_id)
        return Erased(existed=True, num_tokens=self._tokens.delete(run_id, rollout_id))

    async def due(self, run_id: str, limit: int) -> list[EndedGroup]:
        """See `RetentionStore`."""
        run = self._runs.get(run_id)
        if not run.config.retention_steps:
            return []
        held, last = _replayable(run), run.committed_step - run.config.retention_steps - 1
        groups = (
            group
            for step in sorted(run.trained)
            if step <= last
            for group in sorted(run.trained[step])
        )
        return [
            EndedGroup(task_id=task_id, attempts=tuple(attempts))
            for task_id, *attempts in groups
            if task_id not in held
        ][:limit]

    async def forget(self, run_id: str, groups: Sequence[EndedGroup]) -> None:
        """See `RetentionStore`."""
        run = self._runs.get(run_id)
        gone = {(group.task_id, *group.attempts): group.task_id for group in groups}
        for step, trained in list(run.trained.items()):
            for group in gone.keys() & set(trained):
                run.steps.pop(gone[group], None)
            run.trained[step] = [group for group in trained if group not in gone]
            if not run.trained[step]:
                del run.trained[step]


def _replayable(run: RunState) -> set[str]:
    return {*run.replay, *_replayed(run)}


def _replayed(run: RunState) -> Iterator[str]:
    """Groups that leased steps train again; they may have left the replay since."""
    for entry in run.ledger.values():
        for sample_id in entry.lease.replayed_ids:
            name = SlotName.parse(rollout_of(sample_id))
            assert name is not None, "what is replayed was made from a lease"
            yield name.task_id
