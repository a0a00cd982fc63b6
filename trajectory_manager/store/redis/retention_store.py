"""Retention: deletion of rollouts and of the records of their groups."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trajectory_manager.model.records import SlotName
from trajectory_manager.store.errors import unwrap
from trajectory_manager.store.redis import keys
from trajectory_manager.store.redis.run_scripts import RunScripts


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedGroup:
    """A group that was committed or became a dead letter."""

    task_id: str
    attempts: tuple[int, ...]
    """Newest attempt of each slot."""

    @property
    def rollout_ids(self) -> list[str]:
        """All rollouts of the group, with any outcome."""
        return [
            str(SlotName(self.task_id, slot, attempt))
            for slot, newest in enumerate(self.attempts)
            for attempt in range(1, newest + 1)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Erased:
    existed: bool
    running: bool = False
    """Whether it runs and was kept."""
    num_tokens: int = 0


class RetentionStore(RunScripts):
    """Deletes rollouts, and the record of the groups they were made for."""

    async def needed(self, run_id: str, rollout_ids: Sequence[str]) -> set[str]:
        """Those whose group is uncommitted or may be replayed, or that are not settled.

        Raises:
            ServiceError: NOT_FOUND (run).
        """
        (names,) = await self._call("list_needed_rollouts", run_id, *rollout_ids)
        return {name.decode() for name in names}

    async def delete(self, run_id: str, rollout_ids: Sequence[str]) -> list[Erased]:
        """Delete finished rollouts with their columns, each atomically. Idempotent."""
        calls = [(keys.deleted_keys(run_id, name), (name,)) for name in rollout_ids]
        replies = await self._scripts.call_many("delete_rollout", calls)
        return [_erased(reply) for reply in replies]

    async def due(self, run_id: str, limit: int) -> list[EndedGroup]:
        """The oldest groups that ended more than retention_steps ago and are not replayed."""
        (groups,) = await self._call("list_retention_due", run_id, limit)
        found = [json.loads(group) for group in groups]
        return [EndedGroup(task_id=name, attempts=tuple(rest)) for name, *rest in found]

    async def forget(self, run_id: str, groups: Sequence[EndedGroup]) -> None:
        """Drop the record of groups whose rollouts are deleted. Idempotent."""
        if groups:
            members = [json.dumps([group.task_id, *group.attempts]) for group in groups]
            await self._call("forget_groups", run_id, *members)


def _erased(reply: Any) -> Erased:
    what, *num_tokens = unwrap(reply)
    return Erased(
        existed=what != b"gone",
        running=what == b"running",
        num_tokens=int(num_tokens[0]) if num_tokens else 0,
    )
