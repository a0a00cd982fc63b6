"""Rollouts, groups, tasks and steps as plain data. Enum numbers equal those of the contract.

A rollout moves RUNNING -> FINISHED | FAILED. A slot of a group moves OPEN -> LEASED -> DONE, and
back to OPEN when its rollout fails. A group moves queued -> running -> ready -> leased ->
committed, and leaves as discarded from running or ready.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Purpose(IntEnum):
    """Training or evaluation."""

    TRAIN = 1
    EVAL = 2


class RolloutState(IntEnum):
    """State of a rollout."""

    RUNNING = 1
    FINISHED = 2
    FAILED = 3


class FailureClass(IntEnum):
    """Who caused a failure."""

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


class ReplayStrategy(IntEnum):
    """How groups that were trained before are drawn again."""

    RECENCY = 1
    REWARD = 2


class DeadLetterReason(IntEnum):
    """Why a group left without being trained."""

    FAILURES = 1
    DROPPED = 2
    WITHHELD = 3
    ZERO_VARIANCE = 4
    DELIVERIES = 5


class Effect(StrEnum):
    """Effect of settling a finished rollout on its group."""

    IGNORED = "ignored"
    DONE = "done"
    COMPLETE = "complete"
    REPLACED = "replaced"
    DISCARDED = "discarded"


class Topic(StrEnum):
    """What a long poll waits for: tasks for agents, groups for the trainer, samples for columns."""

    TASKS = "tasks"
    READY = "ready"
    COLUMNS = "columns"


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
    """Who caused the failure, if it failed."""
    failure_message: str = ""
    """For people."""

    @property
    def state(self) -> RolloutState:
        """FINISHED also for a POLICY failure with rewards, which counts."""
        counts = self.failure_class is FailureClass.POLICY and bool(self.rewards)
        if self.failure_class is FailureClass.NONE or counts:
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
    required_weight_version: int = 0
    """Oldest version to generate with."""
    traceparent: str = ""
    """Trace context it began under."""
    state: RolloutState = RolloutState.RUNNING
    """Its state."""
    outcome: Outcome = Outcome()
    """How it ended."""
    create_time: float = 0.0
    """Unix seconds by the store's clock."""
    finish_time: float = 0.0
    """Unix seconds; 0 while it runs."""


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
    """Replay of trained groups."""
    max_deliveries: int = 0
    """Deliveries of a step without a commit before it goes to the dead letters; 0: any number."""
    max_stored_tokens: int = 0
    """Tokens of the run beyond which admission is closed; 0: any number."""
    retention_steps: int = 0
    """Steps after whose commit rollouts are deleted; 0: never."""

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


@dataclass(frozen=True, slots=True)
class TaskContext:
    """What the task lease of a rollout determines."""

    purpose: Purpose
    """TRAIN or EVAL."""
    required_weight_version: int
    """Oldest version to sample with, for the group not to be too old when trained; 0: any."""


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
class RolloutResult:
    """What a finished rollout contributes to its group."""

    rollout_id: str
    """The rollout."""
    finished: bool
    """False: the sample is to be replaced."""
    reward: float | None = None
    """Value of the run's zero_variance_reward; None: absent."""
    rewards: tuple[tuple[str, float], ...] = ()
    """Rewards of the whole rollout by name."""
    min_weight_version: int = 0
    """Oldest version among trainable tokens."""
    sample_ids: tuple[str, ...] = ()
    """Samples it yields, in order."""
    num_tokens: tuple[int, ...] = ()
    """Tokens of each of these samples."""
    failure_message: str = ""
    """Why it did not finish, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleResult:
    """The effect of settling a rollout."""

    effect: Effect
    """Effect on the group."""
    reason: str = ""
    """Why a group was discarded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostLease:
    """A task lease that has ended while its rollout may still run."""

    rollout_id: str
    """The rollout."""
    surplus: bool
    """True: its group does not need it any more; False: it expired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A group that left the run without being trained."""

    task: Task
    """Its task."""
    reason: DeadLetterReason
    """Why."""
    message: str
    """What failed last, or how old it was; for people."""
    time: float
    """Unix seconds by the store's clock."""
    attempts: tuple[int, ...]
    """Newest attempt of each slot; requeued tasks continue from there."""

    @property
    def rollout_ids(self) -> list[str]:
        """All rollouts of the group."""
        return [
            str(SlotName(self.task.task_id, slot, attempt))
            for slot, newest in enumerate(self.attempts)
            for attempt in range(1, newest + 1)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """The answer to submitted tasks."""

    num_accepted: int
    """Tasks that were new."""
    num_free: int
    """Tasks the queue still takes."""


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
