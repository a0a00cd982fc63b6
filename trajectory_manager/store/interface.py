"""What a store must do. Each method is one atomic step; what takes more is in `rollouts.py`.

Tokens live with their rollout, everything that orders or counts lives with its run. Refusals are
`ServiceError`s from `refusals.py`; a store that cannot be reached raises UNAVAILABLE. The store's
own clock decides about leases.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.chassis.errors import ServiceError
from trajectory_manager.model.records import (
    DeadLetter,
    Durability,
    LostLease,
    Purpose,
    Rollout,
    RolloutResult,
    RunConfig,
    SettleResult,
    Submitted,
    Task,
    TaskContext,
    TaskLease,
    Topic,
)
from trajectory_manager.model.run_counts import RunCounts
from trajectory_manager.model.steps import LeaseAttempt, PublishWait, Reconciled
from trajectory_manager.model.tokens import (
    Append,
    Appended,
    RolloutFinish,
    Tokens,
    Turn,
    TurnBegin,
    TurnRecord,
)
from trajectory_manager.store.column_interface import ColumnStore
from trajectory_manager.store.retention_interface import RetentionStore

# A group whose samples failed more often than this is given up: something is wrong with its task.
MAX_REPLACEMENTS = 10

# Dead letters kept per run; the oldest leave first.
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
        """Create the turn or take it over; a finished turn is only returned, with what it has.

        The same attempt keeps its epoch, another gets the next; a restart of the store ends all.

        Raises:
            ServiceError: NOT_FOUND, PERMISSION_DENIED, ROLLOUT_FINISHED, ALREADY_EXISTS (prompt).
        """
        ...

    async def append(self, appends: Sequence[Append]) -> list[Appended | ServiceError]:
        """Do each of `appends` by itself, in order; an error stands where one was refused.

        What follows a refused append of its turn would leave a gap, and is refused with it.
        Idempotent. Errors: NOT_FOUND, STALE_EPOCH, ROLLOUT_FINISHED, TURN_FINISHED, ALREADY_EXISTS
        (the overlap or the end differs), OFFSET_GAP (which has failed the rollout as
        INFRASTRUCTURE), and those of a store that is away or full.
        """
        ...

    async def finish(
        self, run_id: str, finishes: Sequence[RolloutFinish]
    ) -> list[tuple[Rollout, list[TurnRecord]] | ServiceError]:
        """Close each rollout if it runs; answer it with its turns' spans either way.

        Errors: NOT_FOUND, PERMISSION_DENIED, and those of a store that is away or full.
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
        """What each turn added.

        Raises:
            ServiceError: NOT_FOUND, of the rollout or of a turn.
        """
        ...

    async def read(
        self, run_id: str, rollout_ids: Sequence[str], *, spans_only: bool = False
    ) -> list[tuple[Rollout, list[TurnRecord]] | None]:
        """Each rollout with its turns in the order they began, as of one moment; None: unknown."""
        ...

    async def record(
        self, run_id: str, recorded: Sequence[tuple[Rollout, Sequence[TurnRecord]]]
    ) -> list[bool]:
        """Store whole closed rollouts; False for one that is there already. Idempotent.

        Raises:
            ServiceError: ALREADY_EXISTS with other content.
        """
        ...


class RunStore(Protocol):
    """Tasks, groups, leases and admission of each run; NOT_FOUND for one not created."""

    async def create_run(self, run_id: str, config: RunConfig) -> RunConfig | None:
        """Create the run; None if that happened, else the config that is there already."""
        ...

    async def run_ids(self) -> list[str]:
        """All runs."""
        ...

    async def config(self, run_id: str) -> RunConfig:
        """The rules of a run."""
        ...

    async def version(self, run_id: str, topic: Topic) -> int:
        """A number that changes whenever a waiting call of `topic` should look again."""
        ...

    async def submit(self, run_id: str, tasks: Sequence[Task], max_queued: int) -> Submitted:
        """Queue all tasks that are new, or none.

        Raises:
            ServiceError: RESOURCE_EXHAUSTED, ALREADY_EXISTS (same task_id, other task).
        """
        ...

    async def lease_task(
        self, run_id: str, purposes: Sequence[Purpose], nonce: str
    ) -> TaskLease | None:
        """Lease one open slot, admitting a group if none is open; earlier purposes first.

        Admission: admitted - discarded - leased to a step <= `RunConfig.max_outstanding_groups`. A
        group knows from its place with which weights it must be sampled: `TaskContext`.
        Beyond max_stored_tokens no TRAIN group is admitted, except those that the next step needs
        if its commit lets retention free tokens.
        A TRAIN group has num_samples + num_extra_samples slots.

        Raises:
            ServiceError: STORE_FULL, when only max_stored_tokens keeps a queued task out.
        """
        ...

    async def admit_recorded(self, run_id: str, tasks: Sequence[Task]) -> Submitted:
        """Admit groups whose rollouts, each the first attempt of its slot, are recorded; or none.

        The slots are leased until they are settled; `num_free` is what admission still lets in.

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
        """List the rollout in its run; with a nonce check its lease first and tell of its task.

        Raises:
            ServiceError: LEASE_EXPIRED.
        """
        ...

    async def listed(self, run_id: str, start: int, limit: int) -> list[str]:
        """Rollouts in the order they were enlisted, from position `start`."""
        ...

    async def add_outbox_marks(self, run_id: str, rollout_ids: Sequence[str]) -> None:
        """Outbox marks: these rollouts are about to close and must be settled. Idempotent."""
        ...

    async def remove_outbox_marks(self, run_id: str, rollout_ids: Sequence[str]) -> None:
        """Take outbox marks back: these rollouts were not closed. Idempotent."""
        ...

    async def unsettled(self, run_id: str, limit: int) -> list[str]:
        """Rollouts with an outbox mark, oldest first."""
        ...

    async def expired(self, run_id: str, limit: int) -> list[LostLease]:
        """Leases that have run out or that their group ended, and that are not settled."""
        ...

    async def settle(self, run_id: str, results: Sequence[RolloutResult]) -> list[SettleResult]:
        """Tell groups about closed rollouts, in order; clear their marks and leases. Idempotent.

        A failed sample opens its slot again outside admission. A group is complete with its first
        num_samples: leases of the others end, and nothing they do counts any more. A complete group
        passes the zero-variance filter and becomes ready. A discarded one returns its capacity and
        is a dead letter.
        """
        ...

    async def dead_letters(self, run_id: str, start: int, limit: int) -> list[DeadLetter]:
        """Groups that left without being trained, oldest first, from position `start`."""
        ...

    async def requeue(self, run_id: str, task_ids: Sequence[str]) -> int:
        """Queue the tasks of dead letters again and remove the letters; return how many."""
        ...

    async def add_stored_tokens(self, run_id: str, delta: int) -> None:
        """Count tokens of the run that were stored (or deleted, if negative) since last time."""
        ...

    async def run_counts(self, run_id: str) -> RunCounts:
        """Counts of the run."""
        ...


class LedgerStore(Protocol):
    """What the trainer of each run was given: steps, epochs, commits."""

    async def reconcile(self, run_id: str, step: int, trainer_id: str) -> Reconciled:
        """Make `trainer_id` the trainer, `step` the committed one.

        Entries up to `step` are consumed. Later ones stay while they follow on it without a hole;
        after a restore to an earlier step they do not, and their groups return to the queue's head.
        The first that was leased by max_deliveries trainers goes to the dead letters when another
        one comes, and those after it return to the queue's head too.

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
        num_shards: int = 1,
        min_groups: int = 0,
        streaming: bool = False,
    ) -> LeaseAttempt:
        """The ledger entry of `step`, written now if enough fresh groups are ready.

        It takes `num_groups` (0: groups_per_step), or what there is of at least `min_groups` (0: as
        many). A repeated step is what it was, however much is asked for. With `streaming` any group
        is enough for an open entry, which takes more whenever it is asked for, until it has enough;
        the base version stays that of the first time.
        An open entry opens no admission: what was sampled meanwhile would be older than it need be.
        Groups go in the order they were completed. With a fifo_window only those do that are among
        the first so many, by admission, that no step has; a step that cannot be filled then waits
        for one of these, which still runs. Groups beyond max_staleness become dead letters.
        Replayed groups are drawn now too, outside admission and staleness.

        Raises:
            ServiceError: STALE_EPOCH, STEP_OUT_OF_ORDER (also after an open step),
                INVALID_ARGUMENT (num_groups, min_groups, num_shards).
        """
        ...

    async def await_step(
        self, run_id: str, epoch: int, step: int, base_weight_version: int
    ) -> None:
        """The trainer waits for `step`, which starts from these weights: admission counts from it.

        Admission then counts on being told so after each step. No effect for a step that is leased.

        Raises:
            ServiceError: STALE_EPOCH.
        """
        ...

    async def extend_samples(self, run_id: str, epoch: int, step: int) -> float:
        """Renew the lease of a step; return the seconds it now lives."""
        ...

    async def commit(self, run_id: str, epoch: int, step: int) -> int:
        """Consume all entries up to `step` for good; return how many samples it covered.

        Raises:
            ServiceError: STALE_EPOCH, NOT_FOUND, STEP_OUT_OF_ORDER (an open step).
        """
        ...

    async def publish_wait(self, run_id: str, epoch: int, weight_version: int) -> PublishWait:
        """What a publish of `weight_version` would make too old; time counts from the first ask.

        Raises:
            ServiceError: STALE_EPOCH.
        """
        ...

    async def committed_steps(self, run_id: str, rollout_ids: Sequence[str]) -> list[int]:
        """The step that trained each rollout and is committed; 0: none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """A store: its parts and what its acknowledgements survive."""

    tokens: TokenStore
    """Rollouts."""
    runs: RunStore
    """Runs."""
    ledger: LedgerStore
    """Steps of the trainer."""
    columns: ColumnStore
    """What other consumers compute."""
    retention: RetentionStore
    """What is deleted."""
    durability: Durability
    """The strongest class a run may ask for."""
    ready: Callable[[], Awaitable[bool]]
    """Whether it answers."""


__all__ = ["MAX_DEAD_LETTERS", "MAX_REPLACEMENTS", "LedgerStore", "RunStore", "Store", "TokenStore"]
