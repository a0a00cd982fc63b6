"""Deletion of rollouts that no step needs any more: on request, and after retention_steps.

A rollout is needed while its group is running, incomplete, ready or leased, while it may be
replayed or a leased step replays it, and until it is settled. Rollouts are deleted before the
record of their group, so that the next sweep completes an interrupted one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trajectory_manager.store.redis.connect import Store
from trajectory_manager.store.redis.retention_store import Erased

_SWEEP_GROUPS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleted:
    """The result of a deletion."""

    num_deleted: int
    """Rollouts that existed and are deleted now."""
    needed: tuple[str, ...]
    """Rollouts that were kept: they run or are needed."""


class Retention:
    """Deletes rollouts and keeps the count of a run's stored tokens."""

    def __init__(self, store: Store) -> None:
        self._store = store.retention
        self._runs = store.runs
        self._inspection = store.inspection

    async def delete(self, run_id: str, rollout_ids: Sequence[str]) -> Deleted:
        """Delete the finished rollouts among `rollout_ids` that are not needed. Idempotent.

        Raises:
            ServiceError: NOT_FOUND (run).
        """
        asked = list(dict.fromkeys(rollout_ids))
        needed = await self._store.needed(run_id, asked)
        free = [name for name in asked if name not in needed]
        erased = dict(zip(free, await self._delete(run_id, free), strict=True))
        needed |= {name for name, one in erased.items() if one.running}
        return Deleted(
            num_deleted=sum(one.existed and not one.running for one in erased.values()),
            needed=tuple(name for name in asked if name in needed),
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
