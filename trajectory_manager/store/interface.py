"""What a store must do. Each method is one atomic step; what takes more is in `rollouts.py`.

Tokens live with their rollout, everything that orders or counts lives with its run. Errors are
the `ServiceError`s of `errors.py`; an unreachable store raises UNAVAILABLE. The store's
own clock decides about leases.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.chassis.errors import ServiceError
from trajectory_manager.model.records import (
    DeadLetter,
    Durability,
    EmptyReason,
    LostLease,
    Purpose,
    Rollout,
    RolloutResult,
    SettleResult,
    Submitted,
    Task,
    TaskContext,
    TaskLease,
    Topic,
)
from trajectory_manager.model.run_counts import RunCounts
from trajectory_manager.model.runs import Run, RunConfig
from trajectory_manager.model.steps import LeaseAttempt, PublishWait, Reconciled, Rejected
from trajectory_manager.model.tokens import (
    Append,
    Appended,
    Cut,
    RolloutFinish,
    Tokens,
    Turn,
    TurnBegin,
    TurnRecord,
)
from trajectory_manager.store.column_interface import ColumnStore
from trajectory_manager.store.inspection_interface import InspectionStore
from trajectory_manager.store.retention_interface import RetentionStore

# Failed samples after which a group is discarded: its task is probably broken.
MAX_REPLACEMENTS = 10

# Dead letters kept per run; the oldest are dropped first.
MAX_DEAD_LETTERS = 10_000


class TokenStore(Protocol):
    """The record of each rollout: header, turns, tokens."""

    async def start_rollout(self, rollout: Rollout, *, leased: bool) -> None:
        """Create the record. Idempotent; with a lease the credential may change before any turn.

        Raises:
            ServiceError: ALREADY_EXISTS with other content, ROLLOUT_FINISHED.
        """
        ...

    async def begin_turn(
        self, run_id: str, rollout_id: str, credential_digest: str, begin: TurnBegin
    ) -> tuple[Rollout, TurnRecord]:
        """Create the turn or take it over; an ended turn is only returned, with its tokens.

        The same attempt keeps its epoch, another gets the next; a restart of the store fences all.

        Raises:
            ServiceError: NOT_FOUND, PERMISSION_DENIED, ROLLOUT_FINISHED, ALREADY_EXISTS (another
                prompt, sampling or template).
        """
        ...

    async def begin_first_turn(
        self, run_id: str, rollout_id: str, credential_digest: str, begin: TurnBegin
    ) -> tuple[Rollout, TurnRecord] | None:
        """As `begin_turn`, unless the rollout has turns and this is none of them: then None."""
        ...

    async def append(self, appends: Sequence[Append]) -> list[Appended | ServiceError]:
        """Execute `appends` independently, in order; a result is an error where one failed.

        Appends after a failed one of the same turn would leave a gap and get the same error.
        Idempotent. Errors: NOT_FOUND, STALE_EPOCH, ROLLOUT_FINISHED, TURN_FINISHED, ALREADY_EXISTS
        (the overlap or the end differs), OFFSET_GAP (which has failed the rollout as
        INFRASTRUCTURE), and those of an unavailable or full store.
        """
        ...

    async def finish(
        self, run_id: str, finishes: Sequence[RolloutFinish]
    ) -> list[tuple[Rollout, list[TurnRecord]] | ServiceError]:
        """Finish each rollout that runs; return each with the spans of its turns.

        Errors: NOT_FOUND, PERMISSION_DENIED, and those of an unavailable or full store.
        """
        ...

    async def rollout(self, run_id: str, rollout_id: str) -> Rollout | None:
        """The header, or None."""
        ...

    async def turns(self, run_id: str, rollout_id: str) -> list[Turn]:
        """All turns in the order they began."""
        ...

    async def newest_turn(self, run_id: str, rollout_id: str) -> TurnRecord | None:
        """The turn that began last, with its tokens; None if there is none."""
        ...

    async def tokens(self, run_id: str, rollout_id: str, turn_ids: Sequence[str]) -> list[Tokens]:
        """The own tokens of each turn.

        Raises:
            ServiceError: NOT_FOUND, of the rollout or of a turn.
        """
        ...

    async def windows(self, run_id: str, rollout_id: str, cuts: Sequence[Cut]) -> list[Tokens]:
        """Of each cut the stored tokens, without spans.

        Raises:
            ServiceError: NOT_FOUND (rollout).
        """
        ...

    async def read(
        self, run_id: str, rollout_ids: Sequence[str], *, spans_only: bool = False
    ) -> list[tuple[Rollout, list[TurnRecord]] | None]:
        """Each rollout with its turns in the order they began, as one snapshot; None: unknown."""
        ...

    async def record(
        self, run_id: str, recorded: Sequence[tuple[Rollout, Sequence[TurnRecord]]]
    ) -> list[bool]:
        """Store whole finished rollouts; False for those stored before. Idempotent.

        Raises:
            ServiceError: ALREADY_EXISTS with other content.
        """
        ...


class RunStore(Protocol):
    """Tasks, groups, leases and admission of each run; NOT_FOUND for one not created."""

    async def create_run(self, run_id: str, config: RunConfig) -> RunConfig | None:
        """Create the run; None if it was created, else the existing config."""
        ...

    async def run_ids(self) -> list[str]:
        """The names of all runs."""
        ...

    async def config(self, run_id: str) -> RunConfig:
        """The rules of a run."""
        ...

    async def run(self, run_id: str) -> Run:
        """The run and where it stands."""
        ...

    async def end_run(self, run_id: str) -> None:
        """End the run: no task is leased until a trainer reconciles. Idempotent."""
        ...

    async def delete_run(self, run_id: str) -> int:
        """Delete an ended run and everything of it; return how many rollouts this call deleted.

        Many atomic steps: a call that follows an interrupted one completes it. Until then the run
        does not exist for other calls and cannot be created.

        Raises:
            ServiceError: WRONG_STATE, the run has not ended.
        """
        ...

    async def version(self, run_id: str, topic: Topic) -> int:
        """A number that changes whenever a long poll of `topic` must attempt again."""
        ...

    async def submit(self, run_id: str, tasks: Sequence[Task], max_queued: int) -> Submitted:
        """Queue all tasks that are new, or none.

        Raises:
            ServiceError: RESOURCE_EXHAUSTED, ALREADY_EXISTS (same task_id, other task).
        """
        ...

    async def lease_task(
        self, run_id: str, purposes: Sequence[Purpose], nonce: str
    ) -> TaskLease | EmptyReason:
        """Lease one open slot, admitting a group if none is open; earlier purposes first.

        A call with the nonce of a lease that is held gets that lease, renewed.
        Admission: admitted - discarded - leased to a step <= `RunConfig.max_outstanding_groups`.
        The position of a group determines its required weight version: `TaskContext`.
        Beyond max_stored_tokens no TRAIN group is admitted, except those of the next step if its
        commit lets retention free tokens.
        A TRAIN group has num_samples + num_extra_samples slots.
        """
        ...

    async def lease_own_task(self, run_id: str, task: Task, nonce: str) -> TaskLease | EmptyReason:
        """Lease one open slot of `task`, an agent's own; a new one is admitted, never queued.

        Its slots are leased by this method only. Nonces and admission are as in `lease_task`.

        Raises:
            ServiceError: GROUP_FULL (no slot is open, or the group has left), ALREADY_EXISTS
                (same task_id, other task).
        """
        ...

    async def admit_recorded(self, run_id: str, tasks: Sequence[Task]) -> Submitted:
        """Admit groups whose rollouts, each the first attempt of its slot, are recorded; or none.

        The slots are leased until they are settled; `num_free` is how many more are admissible.

        Raises:
            ServiceError: RESOURCE_EXHAUSTED, ALREADY_EXISTS (same task_id, other task).
        """
        ...

    async def extend_tasks(self, run_id: str, leases: Sequence[tuple[str, str]]) -> list[bool]:
        """Extend each lease (rollout_id, nonce); False for those that are gone."""
        ...

    async def register_rollout(
        self, run_id: str, rollout_id: str, nonce: str | None
    ) -> TaskContext | None:
        """Add the rollout to its run; with a nonce, check its lease and return its task context.

        Raises:
            ServiceError: LEASE_EXPIRED.
        """
        ...

    async def listed(self, run_id: str, start: int, limit: int) -> list[str]:
        """Rollouts in the order they were registered, from position `start`."""
        ...

    async def add_outbox_marks(self, run_id: str, rollout_ids: Sequence[str]) -> None:
        """Mark rollouts that are about to finish and must be settled. Idempotent."""
        ...

    async def remove_outbox_marks(self, run_id: str, rollout_ids: Sequence[str]) -> None:
        """Remove the marks of rollouts that did not finish. Idempotent."""
        ...

    async def unsettled(self, run_id: str, limit: int) -> list[str]:
        """Rollouts with an outbox mark, oldest first."""
        ...

    async def expired(self, run_id: str, limit: int) -> list[LostLease]:
        """Leases that expired or that their group ended, of rollouts that are not settled."""
        ...

    async def settle(self, run_id: str, results: Sequence[RolloutResult]) -> list[SettleResult]:
        """Apply finished rollouts to their groups, in order; remove marks and leases. Idempotent.

        A failed sample opens its slot again outside admission. A group is complete with its first
        num_samples: the leases of its other slots end and their rollouts do not count. A complete
        group passes the zero-variance filter and becomes ready. A discarded one frees its capacity
        and is a dead letter.
        """
        ...

    async def dead_letters(
        self, run_id: str, start: int, limit: int, *, newest_first: bool = False
    ) -> list[DeadLetter]:
        """Groups that were discarded from position `start`, oldest first unless asked otherwise."""
        ...

    async def requeue(self, run_id: str, task_ids: Sequence[str]) -> int:
        """Queue the tasks of dead letters again and remove the letters; return how many.

        An agent's own tasks are skipped: they are never queued.
        """
        ...

    async def cancel(self, run_id: str, task_ids: Sequence[str]) -> int:
        """Take back EVAL tasks that are not complete and end their leases; return how many."""
        ...

    async def add_stored_tokens(self, run_id: str, delta: int) -> None:
        """Add `delta` to the count of stored tokens; negative after a deletion."""
        ...

    async def run_counts(self, run_id: str) -> RunCounts:
        """Counts of the run."""
        ...


class LedgerStore(Protocol):
    """The step ledger of each run: steps, epochs, commits."""

    async def reconcile(self, run_id: str, step: int, trainer_id: str) -> Reconciled:
        """Make `trainer_id` the trainer, `step` the committed one.

        Entries up to `step` are consumed. Later ones stay if they follow it without a gap;
        after a restore to an earlier step their groups return to the head of the queue.
        The newest that the last trainer leased becomes dead letters when another trainer
        reconciles, if max_deliveries trainers leased it; later ones return to the head of the
        queue. Those before it were only repeated: no checkpoint covered them yet.

        Raises:
            ServiceError: STALE_EPOCH for a trainer that was replaced before.
        """
        ...

    async def lease_samples(
        self,
        run_id: str,
        epoch: int,
        step: int,
        base_weight_version: int,
        num_groups: int,
        min_groups: int = 0,
        streaming: bool = False,
    ) -> LeaseAttempt:
        """The ledger entry of `step`, written now if enough fresh groups are ready.

        It takes `num_groups` (0: groups_per_step), or what is ready of at least `min_groups` (0:
        the same). A repeated step returns the same entry. With `streaming` any group suffices for
        an open entry, which grows with each call until it is complete; the base version stays that
        of the first call. An open entry does not reopen admission: groups admitted now would be
        sampled with older weights than necessary.
        Groups go in the order they were completed. With a fifo_window only the first `fifo_window`
        unleased groups by admission are eligible; a step that lacks groups waits for a running one
        of these. Groups beyond max_staleness become dead letters. Replayed groups are drawn when
        the entry is complete, outside admission and staleness.

        Raises:
            ServiceError: STALE_EPOCH, STEP_OUT_OF_ORDER (also after an open step),
                INVALID_ARGUMENT (num_groups, min_groups).
        """
        ...

    async def await_step(self, run_id: str, epoch: int, step: int, base_weight_version: int) -> int:
        """Record that the trainer waits for `step`, which starts from these weights.

        Admission counts from it, and relies on this report after each step from then on. Complete
        groups beyond max_staleness become dead letters; their number is returned. No effect for a
        leased step.

        Raises:
            ServiceError: STALE_EPOCH.
        """
        ...

    async def reject(
        self, run_id: str, epoch: int, step: int, messages: Mapping[str, str]
    ) -> Rejected:
        """Take groups that cannot be trained out of `step`; `messages` by group say why.

        They become dead letters, the step opens for others, and later steps return to the head of
        the queue. Replayed groups leave the step and the replay buffer. Others are ignored.

        Raises:
            ServiceError: STALE_EPOCH, NOT_FOUND (the step is committed, or not leased).
        """
        ...

    async def extend_samples(self, run_id: str, epoch: int, step: int) -> float:
        """Renew the lease of a step; return the seconds it now lives."""
        ...

    async def commit(self, run_id: str, epoch: int, step: int) -> int:
        """Commit all entries up to `step`; return how many samples that covered.

        Raises:
            ServiceError: STALE_EPOCH, NOT_FOUND, STEP_OUT_OF_ORDER (an open step).
        """
        ...

    async def publish_wait(self, run_id: str, epoch: int, weight_version: int) -> PublishWait:
        """What a publish of `weight_version` would make too old; the wait starts at the first call.

        Raises:
            ServiceError: STALE_EPOCH.
        """
        ...

    async def committed_steps(self, run_id: str, rollout_ids: Sequence[str]) -> list[int]:
        """The committed step that trained each rollout; 0 for none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """The parts of a store, and its durability."""

    tokens: TokenStore
    """Record of rollouts."""
    runs: RunStore
    """Tasks, groups and leases."""
    ledger: LedgerStore
    """Step ledger."""
    columns: ColumnStore
    """Columns."""
    retention: RetentionStore
    """Deletion."""
    inspection: InspectionStore
    """What people look at."""
    durability: Durability
    """The strongest class a run may require."""
    ready: Callable[[], Awaitable[bool]]
    """Whether it answers."""
