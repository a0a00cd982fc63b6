"""RetentionStore: deletion of rollouts and of the records of their groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from trajectory_manager.model.records import SlotName


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedGroup:
    """A group that was committed or became a dead letter."""

    task_id: str
    """Its name."""
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
    """The result of deleting one rollout."""

    existed: bool
    """Whether it existed."""
    running: bool = False
    """Whether it runs and was kept."""
    num_tokens: int = 0
    """Tokens that were deleted."""


class RetentionStore(Protocol):
    """Deletes rollouts, and the record of the groups they were made for."""

    async def needed(self, run_id: str, rollout_ids: Sequence[str]) -> set[str]:
        """Those whose group is uncommitted or may be replayed, or that are not settled.

        Raises:
            ServiceError: NOT_FOUND (run).
        """
        ...

    async def delete(self, run_id: str, rollout_ids: Sequence[str]) -> list[Erased]:
        """Delete finished rollouts with their columns, each atomically. Idempotent."""
        ...

    async def due(self, run_id: str, limit: int) -> list[EndedGroup]:
        """The oldest groups that ended more than retention_steps ago and are not replayed."""
        ...

    async def forget(self, run_id: str, groups: Sequence[EndedGroup]) -> None:
        """Drop the record of groups whose rollouts are deleted. Idempotent."""
        ...
