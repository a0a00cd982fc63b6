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
    """What settling a closed rollout did to its group."""

    IGNORED = "ignored"
    DONE = "done"
    COMPLETE = "complete"
    REPLACED = "replaced"
    DISCARDED = "discarded"


class Topic(StrEnum):
    """What a long-poll waits for: work for agents, groups for the trainer, samples for columns."""

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
    required_weight_version: int = 0
    """Oldest version to generate with."""
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
class Replay:
    """How trained groups are trained again."""

    strategy: ReplayStrategy
    """RECENCY weighs 1 / (1 + age in steps), REWARD exp((mean reward - highest) / temperature)."""
    capacity_groups: int
    """Committed groups kept; the oldest leave first."""
    groups_per_step: int
    """Replayed groups beside the fresh ones of a step."""
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
    """What happens beyond it."""
    lease_seconds: float
    """Life of a lease without extension."""
    zero_variance_reward: str
    """Drop groups whose samples all have the same reward of this name; empty: keep all."""
    durability: Durability
    """What the run asks of its store."""
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
        """Groups that one step may ask for: more would never be ready at once."""
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
    """What a leased task says of its rollouts."""

    purpose: Purpose
    """TRAIN or EVAL."""
    required_weight_version: int
    """What an older version sampled would be too old when the group is trained; 0: any."""


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
    """What a group needs to know about a closed rollout."""

    rollout_id: str
    """The rollout."""
    finished: bool
    """False: the sample is to be replaced."""
    reward: float | None = None
    """Value of the run's zero_variance_reward; None: not given."""
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
    """The answer to a result."""

    effect: Effect
    """What it did."""
    reason: str = ""
    """Why a group was discarded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostLease:
    """A task lease that is over while its rollout may still run."""

    rollout_id: str
    """The rollout."""
    surplus: bool
    """True: its group needs it no more; False: its time ran out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A group that left without being trained."""

    task: Task
    """Its task."""
    reason: DeadLetterReason
    """Why."""
    message: str
    """What failed last, or how old it was; for people."""
    time: float
    """Unix seconds by the store's clock."""
    attempts: tuple[int, ...]
    """Newest attempt of each slot; a later life of the task goes on from there."""

    @property
    def rollout_ids(self) -> list[str]:
        """All rollouts that were made for it."""
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
