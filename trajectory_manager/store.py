"""What a store must do. Each method is one atomic step; what takes more is in `rollouts.py`.

Two protocols, because they shard differently: tokens live with their rollout, everything that
orders or counts lives with its run. Refusals are `ServiceError`s from `refusals.py`; a store that
cannot be reached raises UNAVAILABLE. The store's own clock decides about leases.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from trajectory_manager.records import (
    Durability,
    LeaseAttempt,
    Outcome,
    Purpose,
    Readiness,
    Reconciled,
    Rollout,
    RunConfig,
    Settled,
    Settlement,
    StepLease,
    Submitted,
    Task,
    TaskLease,
    Topic,
)
from trajectory_manager.token_records import Opening, Span, Tokens, Turn

# A group whose samples failed more often than this is given up: something is wrong with its task.
MAX_REPLACEMENTS = 10


class TokenStore(Protocol):
    """The record of each rollout: header, turns, tokens."""

    async def create_rollout(self, rollout: Rollout, *, leased: bool) -> None:
        """Create the record. Idempotent; with a lease the credential may change before any turn.

        Raises:
            ServiceError: ALREADY_EXISTS with other content, ROLLOUT_FINISHED.
        """
        ...

    async def open_turn(
        self, run_id: str, rollout_id: str, credential_digest: str, opening: Opening
    ) -> Turn:
        """Create the turn or take it over; a finished turn is only returned.

        The same attempt keeps its epoch, another gets the next; a restart of the store ends all.

        Raises:
            ServiceError: NOT_FOUND, PERMISSION_DENIED, ROLLOUT_FINISHED, ALREADY_EXISTS (prompt).
        """
        ...

    async def append(
        self, run_id: str, rollout_id: str, turn_id: str, epoch: int, offset: int, tokens: Tokens
    ) -> tuple[int, int]:
        """Store `tokens` at `offset`; return (tokens of the turn now stored, how many are new).

        Raises:
            ServiceError: NOT_FOUND, STALE_EPOCH, ROLLOUT_FINISHED, TURN_FINISHED, ALREADY_EXISTS
                (the overlap differs), OFFSET_GAP (which has failed the rollout as INFRASTRUCTURE).
        """
        ...

    async def end_turn(
        self,
        run_id: str,
        rollout_id: str,
        turn_id: str,
        epoch: int,
        finish_reason: int,
        answer_key: str,
    ) -> None:
        """Close the turn. Idempotent.

        Raises:
            ServiceError: NOT_FOUND, STALE_EPOCH, ROLLOUT_FINISHED, ALREADY_EXISTS (other end).
        """
        ...

    async def close(
        self, run_id: str, rollout_id: str, credential_digest: str | None, outcome: Outcome
    ) -> Rollout:
        """Close the rollout if it runs, and return its header either way.

        Without a credential the manager itself gives the rollout up, also one that never started.

        Raises:
            ServiceError: NOT_FOUND, PERMISSION_DENIED.
        """
        ...

    async def rollout(self, run_id: str, rollout_id: str) -> Rollout | None:
        """The header, or None."""
        ...

    async def turns(self, run_id: str, rollout_id: str) -> list[Turn]:
        """All turns in the order they began."""
        ...

    async def tokens(self, run_id: str, rollout_id: str, turn_ids: Sequence[str]) -> list[Tokens]:
        """What each turn added."""
        ...

    async def spans(
        self, run_id: str, rollout_id: str, turn_ids: Sequence[str]
    ) -> list[tuple[Span, ...]]:
        """The spans of what each turn added."""
        ...


class RunStore(Protocol):
    """Groups, queue, leases, ledger and admission of each run; NOT_FOUND for one not created."""

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

        Admission: admitted - discarded - leased to a step <= groups_per_step * (max_staleness + 1).
        """
        ...

    async def extend_tasks(self, run_id: str, leases: Sequence[tuple[str, str]]) -> list[bool]:
        """Extend each lease (rollout_id, nonce); False for those that are gone."""
        ...

    async def enlist(self, run_id: str, rollout_id: str, nonce: str | None) -> Purpose | None:
        """List the rollout in its run; with a nonce check its lease first and return its purpose.

        Raises:
            ServiceError: LEASE_EXPIRED.
        """
        ...

    async def listed(self, run_id: str, start: int, limit: int) -> list[str]:
        """Rollouts in the order they were enlisted, from position `start`."""
        ...

    async def announce(self, run_id: str, rollout_id: str) -> None:
        """Outbox mark: this rollout is about to close and must be settled. Idempotent."""
        ...

    async def unsettled(self, run_id: str, limit: int) -> list[str]:
        """Rollouts with an outbox mark, oldest first."""
        ...

    async def expired(self, run_id: str, limit: int) -> list[str]:
        """Rollouts whose lease has run out and that are not settled."""
        ...

    async def settle(self, run_id: str, settlement: Settlement) -> Settled:
        """Tell the group about a closed rollout and clear its mark and lease. Idempotent.

        A failed sample opens its slot again outside admission. A complete group passes the
        zero-variance filter and becomes ready. A discarded group returns its capacity.
        """
        ...

    async def reconcile(self, run_id: str, step: int, trainer_id: str) -> Reconciled:
        """Make `trainer_id` the trainer, `step` the committed one.

        Entries up to `step` are consumed. Later ones stay while they follow on it without a hole;
        after a restore to an earlier step they do not, and their groups return to the queue's head.

        Raises:
            ServiceError: STALE_EPOCH for a trainer that was replaced before.
        """
        ...

    async def lease_samples(
        self, run_id: str, epoch: int, step: int, base_weight_version: int, num_groups: int
    ) -> LeaseAttempt:
        """The ledger entry of `step`, written now if enough fresh groups are ready.

        Raises:
            ServiceError: STALE_EPOCH, STEP_OUT_OF_ORDER, INVALID_ARGUMENT (num_groups).
        """
        ...

    async def extend_samples(self, run_id: str, epoch: int, step: int) -> float:
        """Renew the lease of a step; return the seconds it now lives."""
        ...

    async def commit(self, run_id: str, epoch: int, step: int) -> int:
        """Consume all entries up to `step` for good; return how many samples it covered."""
        ...

    async def release(self, run_id: str, epoch: int, step: int) -> None:
        """Give the newest uncommitted step's groups back to the queue's head. Idempotent."""
        ...

    async def readiness(self, run_id: str) -> Readiness:
        """Counts of the run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """A store: its two halves and what its acknowledgements survive."""

    tokens: TokenStore
    """Rollouts."""
    runs: RunStore
    """Runs."""
    durability: Durability
    """The strongest class a run may ask for."""
    ready: Callable[[], Awaitable[bool]]
    """Whether it answers."""


__all__ = ["MAX_REPLACEMENTS", "RunStore", "StepLease", "Store", "TokenStore"]
