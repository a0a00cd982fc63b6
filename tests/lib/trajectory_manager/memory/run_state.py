"""The state of one run in memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tests.lib.trajectory_manager.memory.replay_draw import ReplayGroup
from trajectory_manager.model.records import (
    MAX_DEAD_LETTERS,
    MAX_REPLACEMENTS,
    DeadLetter,
    DeadLetterReason,
    Effect,
    Purpose,
    RolloutResult,
    RolloutSummary,
    SettleResult,
    SlotName,
    StalenessPolicy,
    Task,
    Topic,
)
from trajectory_manager.model.runs import RunConfig, StepLease
from trajectory_manager.store.errors import store_error
from trajectory_manager.store.redis.inspection_store import Row, TrainedRecord


@dataclass(slots=True)
class SlotState:
    """One sample of a group: attempt 0 was never leased; settled once its rollout counts."""

    attempt: int = 0
    leased: bool = False
    surplus: bool = False
    result: RolloutResult | None = None


@dataclass(slots=True)
class GroupState:
    """A task that was admitted, the `admission`-th of its run if it is TRAIN."""

    task: Task
    slots: list[SlotState]
    admission: int = 0
    required_weight_version: int = 0
    num_replaced: int = 0

    @property
    def complete(self) -> bool:
        return len(self.results) == self.task.num_samples

    def is_open(self, index: int) -> bool:
        slot = self.slots[index]
        return not (slot.leased or slot.result or slot.surplus or self.complete)

    @property
    def min_weight_version(self) -> int:
        return min((done.min_weight_version for done in self.results if done.sample_ids), default=0)

    @property
    def results(self) -> list[RolloutResult]:
        return [slot.result for slot in self.slots if slot.result is not None]

    @property
    def sample_ids(self) -> list[str]:
        return [sample_id for done in self.results for sample_id in done.sample_ids]


@dataclass(slots=True)
class LedgerEntry:
    """A ledger entry, the groups it took, and the trainer it was delivered to last."""

    lease: StepLease
    groups: list[str]
    epoch: int


@dataclass(slots=True)
class LeaseState:
    """A task lease; `surplus` once its group does not need it; a recorded rollout has no nonce."""

    nonce: str | None
    expires: float
    surplus: bool = False


@dataclass(slots=True)
class Cell:
    """A column of a sample: queued with epoch 0 or when its lease is over, leased, or written."""

    place: tuple[bool, int]
    """In the queue: those of complete groups are first."""
    epoch: int = 0
    expires: float = 0.0
    written: bool = False
    tries: int = 0


def _per_purpose_tasks() -> dict[Purpose, deque[Task]]:
    return {purpose: deque() for purpose in Purpose}


def _dead_letters() -> deque[DeadLetter]:
    return deque(maxlen=MAX_DEAD_LETTERS)


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
    order: dict[str, int] = field(default_factory=dict)
    dead: deque[DeadLetter] = field(default_factory=_dead_letters)
    earlier_attempts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ledger: dict[int, LedgerEntry] = field(default_factory=dict)
    commits: dict[int, int] = field(default_factory=dict)
    trainers: dict[str, int] = field(default_factory=dict)
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    num_cell_places: int = 0
    column_epoch: int = 0
    column_requests: dict[str, set[int]] = field(default_factory=dict)
    create_time: float = 0.0
    end_time: float = 0.0
    steps: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    trained: dict[int, list[tuple[Any, ...]]] = field(default_factory=dict)
    replay: dict[str, ReplayGroup] = field(default_factory=dict)
    rows: dict[str, RolloutSummary | None] = field(default_factory=dict)
    rows_floor: int = 0
    recorded: dict[int, tuple[dict[str, TrainedRecord], int]] = field(default_factory=dict)
    next_base: int = 0
    """Weight version that the next step starts from, as far as is known."""
    training: bool = False
    """Whether the trainer has a whole step and does not wait for the next one yet."""
    reporting_epoch: int = -1
    """Epoch of the newest trainer that reports when it waits."""
    publish: tuple[int, float] = (-1, 0.0)
    versions: dict[Topic, int] = field(default_factory=lambda: dict.fromkeys(Topic, 0))
    epoch: int = 0
    committed_step: int = 0
    num_admitted: int = 0
    num_discarded: int = 0
    num_taken: int = 0
    num_replaced: int = 0
    num_incomplete: int = 0
    num_stored_tokens: int = 0
    num_column_failures: int = 0
    column_failures: dict[str, str] = field(default_factory=dict)

    @property
    def leased_step(self) -> int:
        return max(self.ledger, default=self.committed_step)

    @property
    def num_outstanding(self) -> int:
        return self.num_admitted - self.num_discarded - self.num_taken

    @property
    def num_running_groups(self) -> int:
        return self.num_outstanding - len(self.ready) - self.num_incomplete - self.num_streamed

    @property
    def num_streamed(self) -> int:
        return sum(len(entry.groups) for entry in self.ledger.values() if entry.lease.is_open)

    @property
    def over_cap(self) -> bool:
        return 0 < self.config.max_stored_tokens < self.num_stored_tokens

    @property
    def max_outstanding(self) -> int:
        return self.config.max_outstanding_groups(training=self.training)

    def awaits(self, base: int) -> None:
        if self.training or self.next_base != base:
            self.training, self.next_base = False, base
            self.changed(Topic.TASKS)

    @property
    def required_weight_version(self) -> int:
        """With which the next group that is admitted must be sampled; groups go in order."""
        if self.config.staleness_policy is StalenessPolicy.WAIT:
            return 0
        batches = self.num_outstanding // self.config.groups_per_step
        return max(0, self.next_base + batches - self.config.max_staleness)

    @property
    def num_admissible(self) -> int:
        bound = self.max_outstanding
        if self.over_cap:
            # With retention the next step frees tokens: finish admission to it would be for ever.
            next_step = self.config.groups_per_step if self.config.retention_steps else 0
            bound = min(bound, next_step)
        return max(0, bound - self.num_outstanding)

    def leasable(self) -> list[str]:
        """The ready groups among the first of the window, in the order they were completed."""
        oldest = sorted(self.order, key=self.order.__getitem__)
        window = self.config.fifo_window
        # What an open step has stays in its window.
        inside = set(oldest[: window - self.num_streamed if window else None])
        return [task_id for task_id in self.ready if task_id in inside]

    def row(self, number: int, rollout_id: str) -> Row:
        summary = self.rows.get(rollout_id)
        is_deleted = rollout_id in self.rows and summary is None
        return Row(number, rollout_id, summary, is_deleted)

    def keep_row(self, rollout_id: str, summary: RolloutSummary | None) -> None:
        """Add the row of a rollout that was started and has none."""
        if rollout_id in list(self.listed)[self.rows_floor :]:
            self.rows.setdefault(rollout_id, summary)

    def changed(self, *topics: Topic) -> None:
        for topic in topics:
            self.versions[topic] += 1

    def queue_cells(self, group: GroupState) -> None:
        """Queue a cell for each required column of its samples that has none."""
        for sample_id in group.sample_ids if group.task.purpose is Purpose.TRAIN else ():
            new = [(name, sample_id) for name in self.config.required_columns]
            if new and new[0] not in self.cells:
                self.num_cell_places += 1
                self.cells |= {key: Cell((True, self.num_cell_places)) for key in new}
                self.changed(Topic.COLUMNS)

    def waits_for_columns(self, group: GroupState) -> bool:
        """Whether a complete group lacks columns; then its cells are before those of others."""
        lacking = self.lacking_cells(group)
        if not lacking:
            self.drop_cells(group)
            return False
        places = {}
        for sample_id in group.sample_ids:
            self.num_cell_places += 1
            places[sample_id] = (False, self.num_cell_places)
        for key in lacking:
            self.cells[key].place = places[key[1]]
        self.num_incomplete += 1
        return True

    def lacking_cells(self, group: GroupState) -> list[tuple[str, str]]:
        """The cells of the group that are not written."""
        keys = ((name, s) for s in group.sample_ids for name in self.config.required_columns)
        return [key for key in keys if key in self.cells and not self.cells[key].written]

    def drop_cells(self, group: GroupState) -> None:
        """The group is ready, or discarded."""
        for sample_id in group.sample_ids:
            for name in self.config.required_columns:
                self.cells.pop((name, sample_id), None)

    def end_leases(self, group: GroupState) -> None:
        """The group needs no running rollout any more: the sweep finishes them."""
        for index, slot in enumerate(group.slots):
            lease = self.leases.get(str(SlotName(group.task.task_id, index, slot.attempt)))
            slot.leased = False
            slot.surplus = slot.result is None
            if lease is not None:
                lease.surplus = True

    def replace(
        self, group: GroupState, name: SlotName, result: RolloutResult, time: float
    ) -> SettleResult:
        """Another sample takes the slot; a group that has had too many becomes a dead letter."""
        group.num_replaced += 1
        self.num_replaced += not result.cancelled
        if group.num_replaced > MAX_REPLACEMENTS:
            reason = DeadLetterReason.FAILURES
            self.discard(group, reason, result.failure_message, time)
            return SettleResult(effect=Effect.DISCARDED, reason=reason.name.lower())
        if not group.task.own:
            self.open_slots[group.task.purpose].appendleft((name.task_id, name.slot))
        self.changed(Topic.TASKS)
        return SettleResult(effect=Effect.REPLACED)

    def discard(
        self, group: GroupState, reason: DeadLetterReason, message: str, time: float
    ) -> None:
        """The group becomes a dead letter, its leases end, and its capacity returns."""
        del self.groups[group.task.task_id]
        self.drop_cells(group)
        self.order.pop(group.task.task_id, None)
        self.num_discarded += group.task.purpose is Purpose.TRAIN
        self.end_leases(group)
        attempts = tuple(slot.attempt for slot in group.slots)
        letter = DeadLetter(
            task=group.task, reason=reason, message=message, time=time, attempts=attempts
        )
        self.dead.append(letter)
        self.trained.setdefault(self.committed_step, []).append((group.task.task_id, *attempts))
        self.changed(*Topic)


@dataclass(slots=True)
class Runs:
    """All runs, shared by the parts of an in-memory store."""

    by_id: dict[str, RunState] = field(default_factory=dict)

    def get(self, run_id: str) -> RunState:
        """The state of a run; NOT_FOUND if it does not exist."""
        run = self.by_id.get(run_id)
        if run is None:
            raise store_error("UNKNOWN_RUN", run_id)
        return run
