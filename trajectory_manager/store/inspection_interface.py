"""InspectionStore: what is kept for inspection of a run. No decision depends on it.

The index has a row for each of the newest rollouts that have finished; a rollout without one is
running, or is older than the index: its header says the same. What a step trained on is kept for
the newest steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from trajectory_manager.model.rollout_summary import RolloutSummary


class Row(NamedTuple):
    """A rollout in the index."""

    number: int
    """Its place in the order in which the run's rollouts were started, from 1; 0: not started."""
    rollout_id: str
    """Name."""
    summary: RolloutSummary | None
    """None: the index has no row for it."""
    deleted: bool = False
    """Whether it was deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexPage:
    """Some rollouts, newest first."""

    rows: list[Row]
    """As many as were asked for, or all there are."""
    num_started: int
    """Rollouts that were ever started."""
    num_unindexed: int
    """The oldest of these, which are not listed any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRecord:
    """What a step trained on of a sample, in two parts that this store does not read."""

    sample_id: str
    """The sample."""
    summary: bytes
    """What lists show."""
    tokens: bytes
    """Values of its tokens."""


class InspectionStore(Protocol):
    """The index of a run's rollouts, and what its steps trained on; NOT_FOUND without the run."""

    async def newest(self, run_id: str, before: int, limit: int) -> IndexPage:
        """At most `limit` rollouts that were started before number `before`; 0: the newest."""
        ...

    async def rows(self, run_id: str, rollout_ids: Sequence[str]) -> list[Row]:
        """The row of each; `number` is not read."""
        ...

    async def keep(self, run_id: str, summaries: Mapping[str, RolloutSummary | None]) -> None:
        """Add rows of finished rollouts that lack one; None: the rollout was deleted."""
        ...

    async def forget(self, run_id: str, rollout_ids: Sequence[str]) -> None:
        """Mark rollouts as deleted."""
        ...

    async def trim(self, run_id: str, max_rollouts: int) -> None:
        """Drop some of the rows that are older than the newest `max_rollouts`."""
        ...

    async def of_group(self, run_id: str, group_id: str) -> list[str]:
        """The rollouts of a task, newest first."""
        ...

    async def of_step(self, run_id: str, step: int) -> list[str]:
        """The rollouts of the samples of a step: recorded, committed, or leased."""
        ...

    async def record_trained(
        self,
        run_id: str,
        epoch: int,
        step: int,
        records: Sequence[TrainedRecord],
        num_kept_steps: int,
    ) -> None:
        """Add to what is recorded of `step`; what other trainers recorded of it is forgotten.

        So are the steps before the newest `num_kept_steps` up to it, and later ones of other
        trainers.

        Raises:
            ServiceError: STALE_EPOCH.
        """
        ...

    async def trained_steps(self, run_id: str) -> list[int]:
        """The steps of which something is recorded, oldest first."""
        ...

    async def trained_samples(self, run_id: str, step: int) -> list[str]:
        """The samples that are recorded of a step, by name."""
        ...

    async def trained(
        self, run_id: str, step: int, sample_ids: Sequence[str], *, with_tokens: bool
    ) -> list[TrainedRecord]:
        """What is recorded of these samples; those that are not are left out."""
        ...
