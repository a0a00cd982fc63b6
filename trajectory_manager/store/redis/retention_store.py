"""RetentionStore on Redis."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from services.chassis.errors import ServiceError
from services.chassis.redis.scripts import Scripts
from trajectory_manager.store.errors import unwrap
from trajectory_manager.store.redis import keys
from trajectory_manager.store.retention_interface import EndedGroup, Erased


class RedisRetentionStore:
    """Implements `RetentionStore`."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def needed(self, run_id: str, rollout_ids: Sequence[str]) -> set[str]:
        """Those of `rollout_ids` that must not be deleted."""
        (names,) = await self._call("list_needed_rollouts", run_id, *rollout_ids)
        return {name.decode() for name in names}

    async def delete(self, run_id: str, rollout_ids: Sequence[str]) -> list[Erased]:
        """Delete finished rollouts with their columns."""
        calls = [(keys.deleted_keys(run_id, name), (name,)) for name in rollout_ids]
        replies = await self._scripts.call_many("delete_rollout", calls)
        return [_erased(reply) for reply in replies]

    async def due(self, run_id: str, limit: int) -> list[EndedGroup]:
        """The oldest groups that are past retention_steps."""
        (groups,) = await self._call("list_retention_due", run_id, limit)
        found = [json.loads(group) for group in groups]
        return [EndedGroup(task_id=name, attempts=tuple(rest)) for name, *rest in found]

    async def forget(self, run_id: str, groups: Sequence[EndedGroup]) -> None:
        """Drop the records of groups whose rollouts are deleted."""
        if groups:
            members = [json.dumps([group.task_id, *group.attempts]) for group in groups]
            await self._call("forget_groups", run_id, *members)

    async def _call(self, script: str, run_id: str, *args: Any) -> list[Any]:
        reply = await self._scripts.call(script, keys=keys.run_keys(run_id), args=[run_id, *args])
        return unwrap(reply)


def _erased(reply: Any) -> Erased:
    if isinstance(reply, ServiceError):
        raise reply
    what, *num_tokens = unwrap(reply)
    return Erased(
        existed=what != b"gone",
        running=what == b"running",
        num_tokens=int(num_tokens[0]) if num_tokens else 0,
    )
