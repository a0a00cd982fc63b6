"""The state of one run in memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from trajectory_manager.records import (
    Purpose,
    RunConfig,
    Settlement,
    StepLease,
    Task,
    Topic,
)


@dataclass(slots=True)
class SlotState:
    """One sample of a group: attempt 0 was never leased; settled once its rollout counts."""

    attempt: int = 0
    leased: bool = False
    settlement: Settlement | None = None


@dataclass(slots=True)
class GroupState:
    """A task that was admitted."""

    task: Task
    slots: list[SlotState]
    num_replaced: int = 0

    @property
    def min_weight_version(self) -> int:
        return min(done.min_weight_version for done in self.settlements)

    @property
    def settlements(self) -> list[Settlement]:
        return [slot.settlement for slot in self.slots if slot.settlement is not None]


@dataclass(slots=True)
class LedgerEntry:
    """A ledger entry and the groups it took."""

    lease: StepLease
    groups: list[str]


@dataclass(slots=True)
class LeaseState:
    """A task lease."""

    nonce: str
    expires: float


def _per_purpose_tasks() -> dict[Purpose, deque[Task]]:
    return {purpose: deque() for purpose in Purpose}


def _per_purpose_slots() -> dict[Purpose, deque[tuple[str, int]]]:
    return {purpose: deque() for purpose in Purpose}


@dataclass(slots=True)
class RunState:
    """All state of a run."""

    config: RunConfig
    seen: dict[str, Task] = field(default_factory=dict)
    queue: dict[Purpose, deque[Task]] = field(default_factory=_per_purpose_tasks)
    open_slots: dict[Purpose, deque[tuple[str, int]]] = field(default_factory=_per_purpose_slots)
    groups: dict[str, GroupState] = field(default_factory=dict)
    leases: dict[str, LeaseState] = field(default_factory=dict)
    marks: dict[str, None] = field(default_factory=dict)
    listed: dict[str, None] = field(default_factory=dict)
    ready: deque[str] = field(default_factory=deque)
    ledger: dict[int, LedgerEntry] = field(default_factory=dict)
    commits: dict[int, int] = field(default_factory=dict)
    trainers: dict[str, int] = field(default_factory=dict)
    versions: dict[Topic, int] = field(default_factory=lambda: dict.fromkeys(Topic, 0))
    epoch: int = 0
    committed_step: int = 0
    num_admitted: int = 0
    num_discarded: int = 0
    num_taken: int = 0
    num_replaced: int = 0

    @property
    def leased_step(self) -> int:
        return max(self.ledger, default=self.committed_step)

    @property
    def num_admissible(self) -> int:
        outstanding = self.num_admitted - self.num_discarded - self.num_taken
        return max(0, self.config.max_outstanding_groups - outstanding)

    def changed(self, *topics: Topic) -> None:
        for topic in topics:
            self.versions[topic] += 1
