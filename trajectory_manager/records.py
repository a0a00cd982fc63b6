"""Rollouts, groups, tasks and steps as plain data. Enum numbers equal those of the contract.

A rollout moves RUNNING -> FINISHED | FAILED. A slot of a group moves OPEN -> LEASED -> DONE, and
back to OPEN when its rollout fails. A group moves queued -> running -> ready -> leased ->
committed, and leaves as discarded from running or ready.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Purpose(IntEnum):
    """What a rollout is for."""

    TRAIN = 1
    EVAL = 2


class RolloutState(IntEnum):
    """Where a rollout stands."""

    RUNNING = 1
    FINISHED = 2
    FAILED = 3


class FailureClass(IntEnum):
    """Whose fault a failed rollout was."""

    NONE = 0
    POLICY = 1
    ENVIRONMENT = 2
    INFRASTRUCTURE = 3
    TIMEOUT = 4
    CANCELLED = 5


class StalenessPolicy(IntEnum):
    """What happens to a group that is too old when it is leased."""

    DROP = 1
    WAIT = 2
    MASK = 3
    WITHHOLD = 4


class Durability(IntEnum):
    """What an acknowledged write survives; each class includes the ones before it."""

    FAST = 1
    DURABLE = 2
    REPLICATED = 3


class Effect(StrEnum):
    """What settling a closed rollout did to its group."""

    IGNORED = "ignored"
    DONE = "done"
    COMPLETE = "complete"
    REPLACED = "replaced"
    DISCARDED = "discarded"


class Topic(StrEnum):
    """What a long-poll waits for: work for agents, or groups for the trainer."""

    TASKS = "tasks"
    READY = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A named number for a rollout or one of its turns."""

    name: str
    """What is measured."""
    value: float
    """Its value."""
    turn_id: str = ""
    """The turn it belongs to; empty: the whole rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a rollout ended."""

    rewards: tuple[Reward, ...] = ()
    """Rewards the agent gave."""
    failure_class: FailureClass = FailureClass.NONE
    """Whose fault, if it failed."""
    failure_message: str = ""
    """For people."""

    @property
    def state(self) -> RolloutState:
        """FINISHED also for a POLICY failure with rewards: there the reward stands."""
        stands = self.failure_class is FailureClass.POLICY and bool(self.rewards)
        if self.failure_class is FailureClass.NONE or stands:
            return RolloutState.FINISHED
        return RolloutState.FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The header of a rollout's record."""

    run_id: str
    """Training job."""
    rollout_id: str
    """Name."""
    purpose: Purpose
    """TRAIN or EVAL."""
    group_id: str = ""
    """Group of its lease; empty without one."""
    credential_digest: str = ""
    """SHA-256 of the credential its agent holds."""
    pinned_weight_version: int | None = None
    """Version to generate with, EVAL only."""
    traceparent: str = ""
    """Trace context it began under."""
    state: RolloutState = RolloutState.RUNNING
    """Where it stands."""
    outcome: Outcome = Outcome()
    """How it ended."""
    create_time: float = 0.0
    """Unix seconds by the store's clock."""
    finish_time: float = 0.0
    """Unix seconds; 0 while it runs."""


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
    """What happens beyond it."""
    lease_seconds: float
    """Life of a lease without extension."""
    zero_variance_reward: str
    """Drop groups whose samples all have the same reward of this name; empty: keep all."""
    durability: Durability
    """What the run asks of its store."""

    @property
    def max_outstanding_groups(self) -> int:
        """Groups that may be admitted and not yet leased to a step: B * (max_staleness + 1)."""
        return self.groups_per_step * (self.max_staleness + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What an agent works on; becomes a group."""

    task_id: str
    """Unique in the run."""
    payload_json: str
    """JSON object, opaque here."""
    num_samples: int
    """Rollouts to make."""
    purpose: Purpose
    """TRAIN or EVAL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLease:
    """One rollout of one task, handed to an agent."""

    task: Task
    """The task."""
    rollout_id: str
    """Name of the rollout: task, slot and attempt."""
    nonce: str
    """Proves the lease together with rollout_id."""
    seconds: float
    """Life of the lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """What a group needs to know about a closed rollout."""

    rollout_id: str
    """The rollout."""
    finished: bool
    """False: the sample is to be replaced."""
    reward: float | None = None
    """Value of the run's zero_variance_reward; None: not given."""
    min_weight_version: int = 0
    """Oldest version among trainable tokens."""
    sample_ids: tuple[str, ...] = ()
    """Samples it yields, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The answer to a settlement."""

    effect: Effect
    """What it did."""
    reason: str = ""
    """Why a group was discarded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """The answer to submitted tasks."""

    num_accepted: int
    """Tasks that were new."""
    num_free: int
    """Tasks the queue still takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """The answer to a trainer that takes over."""

    epoch: int
    """Fencing number of this trainer."""
    pending_steps: tuple[int, ...]
    """Steps that will be leased again unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLease:
    """A ledger entry: which samples a step trains on."""

    step: int
    """Step."""
    base_weight_version: int
    """Version staleness is counted from; fixed when the step was first leased."""
    sample_ids: tuple[str, ...]
    """In order, members of a group adjacent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAttempt:
    """The answer to a trainer that asks for a step."""

    lease: StepLease | None
    """None: not enough fresh groups yet."""
    num_too_old: int = 0
    """Groups that this call discarded or withheld as too old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """Counts of a run."""

    num_ready_groups: int
    """Complete groups that wait for the trainer."""
    num_running_groups: int
    """Admitted groups that are not complete."""
    num_admissible_groups: int
    """Groups admission would let start now."""
    num_queued_tasks: int
    """Tasks waiting to be admitted."""
    num_running_rollouts: int
    """Leased rollouts."""
    groups_per_step: int
    """B."""
    committed_step: int
    """Newest committed step."""
    leased_step: int
    """Newest leased step."""
    num_admitted_groups: int
    """Since the run began."""
    num_discarded_groups: int
    """Since the run began."""
    num_replaced_samples: int
    """Since the run began."""


@dataclass(frozen=True, slots=True)
class SlotName:
    """Which attempt at which sample of which group a leased rollout is."""

    task_id: str
    """Group."""
    slot: int
    """Sample of the group, from 0."""
    attempt: int
    """From 1."""

    def __str__(self) -> str:
        return f"{self.task_id}/{self.slot}/{self.attempt}"

    @classmethod
    def parse(cls, rollout_id: str) -> SlotName | None:
        """The slot that `rollout_id` names, or None if it was not made from a lease."""
        parts = rollout_id.rsplit("/", 2)
        if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
            return None
        return cls(parts[0], int(parts[1]), int(parts[2]))
