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
    groups_per_step: int
    reward_name: str = ""
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Rules of a run, fixed when it is created: fields as in `RunConfig` of the contract."""

    group_size: int
    groups_per_step: int
    max_staleness: int
    staleness_policy: StalenessPolicy
    lease_seconds: float
    zero_variance_reward: str
    durability: Durability
    num_extra_samples: int = 0
    fifo_window: int = 0
    publish_wait_seconds: float = 0.0
    required_columns: tuple[str, ...] = ()
    replay: Replay | None = None
    max_deliveries: int = 0
    max_stored_tokens: int = 0
    retention_steps: int = 0
    reward_name: str = ""
    labels: Labels = ()

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
    run_id: str
    config: RunConfig
    create_time: float
    end_time: float = 0.0
    committed_step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLease:
    """A ledger entry: which samples a step trains on."""

    step: int
    base_weight_version: int
    """Version staleness is counted from; fixed when the step was first leased."""
    sample_ids: tuple[str, ...]
    """Fresh samples in order, members of a group adjacent; never part of another step."""
    replayed_ids: tuple[str, ...] = ()
    """Samples of earlier groups that are trained again, in order, after the fresh ones."""
    num_deliveries: int = 1
    is_open: bool = False
    streamed: bool = False
    """Whether it took its last groups as they became ready: a repeated step is cut as before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAttempt:
    lease: StepLease | None
    """None: not enough fresh groups yet."""
    num_too_old: int = 0
    """Groups that this call discarded or withheld as too old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishWait:
    """What a publish under WAIT waits for."""

    seconds: float
    """How much longer it waits at most, by the store's clock; 0: publish now."""
    num_blocking_groups: int = 0
    """Groups with a finished sample that would be too old."""
    running: tuple[str, ...] = ()
    """Rollouts under way of the other groups that are not leased to a step."""
