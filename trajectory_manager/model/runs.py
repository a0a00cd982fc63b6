"""Runs and their rules as plain data."""

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
