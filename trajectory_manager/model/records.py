"""Rollouts, groups, tasks and steps as plain data. Enum numbers equal those of the contract.

A rollout moves RUNNING -> FINISHED | FAILED. A slot of a group moves OPEN -> LEASED -> DONE, and
back to OPEN when its rollout fails. A group moves queued -> running -> ready -> leased ->
committed, and leaves as discarded from running or ready.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple

from seamflow.common.v1 import tokens_pb2

MAX_REPLACEMENTS = 10
"""Failed samples after which a group is discarded: its task is probably broken."""

MAX_DEAD_LETTERS = 10_000
"""Dead letters kept per run; the oldest are dropped first."""


class Purpose(IntEnum):
    TRAIN = 1
    EVAL = 2


class RolloutState(IntEnum):
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
    REJECTED = 6
    OTHER = 0
    """Written by a newer manager."""

    @classmethod
    def _missing_(cls, value: object) -> DeadLetterReason:
        return cls.OTHER


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


class EmptyReason(IntEnum):
    """Why there is no task to lease."""

    NOTHING_QUEUED = 1
    ADMISSION_CLOSED = 2
    STORE_FULL = 3
    RUN_ENDED = 4


Labels = tuple[tuple[str, str], ...]
"""Keys and values for people, sorted by key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A named number for a rollout or one of its turns."""

    name: str
    value: float
    turn_id: str = ""

    def message(self) -> tokens_pb2.Reward:
        return tokens_pb2.Reward(name=self.name, value=self.value, turn_id=self.turn_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a rollout ended."""

    rewards: tuple[Reward, ...] = ()
    failure_class: FailureClass = FailureClass.NONE
    failure_message: str = ""
    untrained_turn_ids: tuple[str, ...] = ()
    truncated: bool = False

    @property
    def state(self) -> RolloutState:
        """FINISHED also for a POLICY failure, which counts."""
        if self.failure_class in (FailureClass.NONE, FailureClass.POLICY):
            return RolloutState.FINISHED
        return RolloutState.FAILED

    @property
    def totals(self) -> dict[str, float]:
        """By name the sum of the rewards of the rollout and its turns."""
        sums: dict[str, float] = {}
        for reward in self.rewards:
            sums[reward.name] = sums.get(reward.name, 0.0) + reward.value
        return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The header of a rollout's record."""

    run_id: str
    rollout_id: str
    purpose: Purpose
    group_id: str = ""
    credential_digest: str = ""
    pinned_weight_version: int | None = None
    required_weight_version: int = 0
    traceparent: str = ""
    state: RolloutState = RolloutState.RUNNING
    outcome: Outcome = Outcome()
    create_time: float = 0.0
    finish_time: float = 0.0
    labels: Labels = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What an agent works on; becomes a group."""

    task_id: str
    payload_json: str
    num_samples: int
    purpose: Purpose
    labels: Labels = ()
    own: bool = False
    """An agent's own: never queued, leased by its name only."""
    pinned_weight_version: int | None = None


@dataclass(frozen=True, slots=True)
class TaskContext:
    """What the task lease of a rollout determines."""

    purpose: Purpose
    required_weight_version: int
    """Oldest version to sample with, for the group not to be too old when trained; 0: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLease:
    """One rollout of one task, handed to an agent."""

    task: Task
    rollout_id: str
    nonce: str
    """Proves the lease together with rollout_id."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """What a finished rollout contributes to its group."""

    rollout_id: str
    finished: bool
    """False: the sample is to be replaced."""
    reward: float | None = None
    """Value of the run's zero_variance_reward; None: absent."""
    rewards: tuple[tuple[str, float], ...] = ()
    """By name the sum of the rewards of the rollout and its turns."""
    min_weight_version: int = 0
    """Oldest version among trainable tokens."""
    sample_ids: tuple[str, ...] = ()
    """Samples it yields, in order."""
    failure_message: str = ""
    """Why it did not finish, for people."""
    cancelled: bool = False
    """Nothing has failed: its replacement is not counted."""
    summary: RolloutSummary | None = None
    """Its row of the index; None: there is no index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleResult:
    effect: Effect
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostLease:
    """A task lease that has ended while its rollout may still run."""

    rollout_id: str
    surplus: bool
    """True: its group does not need it any more; False: it expired."""
    idle_seconds: float = field(default=0.0, compare=False)
    """Since it was last extended."""
    run_ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A group that left the run without being trained."""

    task: Task
    reason: DeadLetterReason
    message: str
    """What failed last, or how old it was; for people."""
    time: float
    """Unix seconds by the store's clock."""
    attempts: tuple[int, ...]
    """Newest attempt of each slot; requeued tasks continue from there."""

    @property
    def rollout_ids(self) -> list[str]:
        return [
            str(SlotName(self.task.task_id, slot, attempt))
            for slot, newest in enumerate(self.attempts)
            for attempt in range(1, newest + 1)
        ]


@dataclass(frozen=True, slots=True)
class SlotName:
    """Which attempt at which sample of which group a leased rollout is."""

    task_id: str
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


class RolloutSummary(NamedTuple):
    """A rollout as lists show it; enums are the contract's numbers."""

    rollout_id: str
    purpose: int
    state: int
    failure_class: int
    finish_reason: int
    """FinishReason of its last turn; 0 while that runs."""
    truncated: bool
    in_group: bool
    num_turns: int
    num_tokens: int
    num_policy_tokens: int
    min_weight_version: int
    """Oldest version that sampled some; -1: nothing is sampled."""
    max_weight_version: int
    """Newest such version; -1 likewise."""
    reward: float | None
    """Of the run's name; None: it has none."""
    create_time: float
    finish_time: float
    step: int
