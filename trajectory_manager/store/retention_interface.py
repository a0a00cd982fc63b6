"""What a store must do to forget what nobody needs any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from trajectory_manager.model.records import SlotName


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedGroup:
    """A group that was committed or died, and how many rollouts were made for it."""

    task_id: str
    """Its name."""
    attempts: tuple[int, ...]
    """Rollouts that each of its samples took."""

    @property
    def rollout_ids(self) -> list[str]:
        """Every rollout that was made for it, whatever became of it."""
        return [
            str(SlotName(self.task_id, slot, attempt))
            for slot, newest in enumerate(self.attempts)
            for attempt in range(1, newest + 1)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Erased:
    """What became of one rollout that was to be deleted."""

    existed: bool
    """False: there was none."""
    running: bool = False
    """True: it runs, and stays."""
    num_tokens: int = 0
    """Tokens that are gone."""


class RetentionStore(Protocol):
    """Deletes rollouts, and the record of the groups they were made for."""

    async def needed(self, run_id: str, rollout_ids: Sequence[str]) -> set[str]:
        """Those whose group is not trained yet or may be replayed, or whose end is not settled.

        Raises:
            ServiceError: NOT_FOUND (run).
        """
        ...

    async def delete(self, run_id: str, rollout_ids: Sequence[str]) -> list[Erased]:
        """Delete closed rollouts, with their columns; each is one atomic step. Idempotent."""
        ...

    async def due(self, run_id: str, limit: int) -> list[EndedGroup]:
        """The oldest groups that ended more than retention_steps ago and are not replayed."""
        ...

    async def forget(self, run_id: str, groups: Sequence[EndedGroup]) -> None:
        """Drop the record of groups whose rollouts are deleted. Idempotent."""
        ...


__all__ = ["EndedGroup", "Erased", "RetentionStore"]
