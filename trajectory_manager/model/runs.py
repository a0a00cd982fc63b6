"""Runs, their rules and their counts as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from trajectory_manager.model.records import Durability, Labels, ReplayStrategy, StalenessPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How trained groups are trained again."""

    strategy: ReplayStrategy
    """RECENCY weighs 1 / (1 + age in steps), REWARD exp((mean reward - highest) / temperature)."""
    capacity_groups: int
    """Committed groups kept; the oldest leave first."""
    groups_per_step: int
    """Replayed groups per step, in addition to the fresh ones."""
    reward_name: str = ""
    """Reward that weighs, for REWARD."""
    temperature: float = 1.0
    """Of the weights, for REWARD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Rules of a run, fixed when it is created."""

    group_size: int
    """Samples per group (G)."""
    groups_per_step: int
    """Groups a training step consumes (B)."""
    max_staleness: int
    """Greatest difference between a step's base version and a sample's oldest version."""
    staleness_policy: StalenessPolicy
    """Treatment of groups beyond max_staleness."""
    lease_seconds: float
    """Life of a lease without extension."""
    zero_variance_reward: str
    """Drop groups whose samples all have the same reward of this name; empty: keep all."""
    durability: Durability
    """Durability class that the run requires of its store."""
    num_extra_samples: int = 0
    """Samples a group starts beyond those it needs (k)."""
    fifo_window: int = 0
    """Groups from the oldest unleased one that a step may take from; 0: order of completion."""
    publish_wait_seconds: float = 0.0
    """WAIT: longest time a publish waits."""
    required_columns: tuple[str, ...] = ()
    """Columns that samples must have before their group is ready."""
    replay: Replay | None = None
    max_deliveries: int = 0
    """Deliveries of a step without a commit before it goes to the dead letters; 0: any number."""
    max_stored_tokens: int = 0
    """Tokens of the run beyond which admission is closed; 0: any number."""
    retention_steps: int = 0
    """Steps after whose commit rollouts are deleted; 0: never."""
    reward_name: str = ""
    """Reward that every finished TRAIN rollout has; empty: any."""
    labels: Labels = ()
    """For people."""

    def max_outstanding_groups(self, *, training: bool = False) -> int:
        """Groups that may be admitted and not yet leased to a step: B * (max_staleness + 1).

        While a step is trained one batch fewer: the next step will start from newer weights than
        there are to sample with. Under WAIT the publish waits for that batch instead.
        """
        waits = self.staleness_policy is StalenessPolicy.WAIT
        ahead = self.max_staleness + (waits or not training)
        return self.groups_per_step * ahead

    @property
    def max_leased_groups(self) -> int:
        """Groups that one step may request: more would never be ready at the same time."""
        most = self.max_outstanding_groups()
        return min(most, self.fifo_window or most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run and where it stands."""

    run_id: str
    config: RunConfig
    create_time: float
    """Unix seconds by the store's clock."""
    end_time: float = 0.0
    """Unix seconds; 0 while it runs."""
    committed_step: int = 0


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
