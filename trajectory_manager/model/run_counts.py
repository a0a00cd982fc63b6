"""Counts of a run, for the trainer, agents and operators."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCounts:
    """Counts of a run."""

    num_ready_groups: int
    """Complete groups that wait for the trainer."""
    num_running_groups: int
    """Admitted groups whose samples are not complete."""
    num_admissible_groups: int
    """Groups that admission accepts now."""
    num_queued_tasks: int
    """Tasks waiting to be admitted."""
    num_running_rollouts: int
    """Leased rollouts."""
    groups_per_step: int
    """Groups that a step consumes (B)."""
    committed_step: int
    leased_step: int
    num_admitted_groups: int
    """Since the run began."""
    num_discarded_groups: int
    """Since the run began."""
    num_replaced_samples: int
    """Since the run began."""
    num_incomplete_groups: int
    """Complete groups that wait for a required column."""
    num_replay_groups: int
    """Committed groups kept for replay."""
    num_dead_letters: int
    """Dead letters that can be requeued."""
    num_stored_tokens: int
    """Tokens stored for the run, as of the last sweep."""
    num_kept_back_groups: int
    """Ready groups outside the fifo_window: no step may take them yet."""
    num_open_groups: int
    """Groups of the open step: neither ready nor running."""
    num_column_failures: int
    """Failed tries to compute a column of a sample."""
    column_failure: str = ""
    """The newest of these by column, unless the column was written since."""

    @property
    def num_leasable_groups(self) -> int:
        """Groups that a step may take now."""
        return self.num_ready_groups - self.num_kept_back_groups
