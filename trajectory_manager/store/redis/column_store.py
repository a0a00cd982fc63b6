"""Columns: values of samples that consumers other than the trainer compute.

Rows are samples, columns the run's required_columns. A cell moves QUEUED -> LEASED -> WRITTEN; an
expired lease queues it again. Cells of a sample exist from the end of its rollout, while others of
its group still run, until the group is ready (it is complete and all its cells are written) or is
discarded. Those of complete groups are leased first.
Values live with the rollout. They carry the epoch of their lease, and a newer lease
overwrites what an older one left incomplete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from seamflow.trajectory.v1 import column_service_pb2 as pb

from trajectory_manager.model.records import MAX_DEAD_LETTERS, MAX_REPLACEMENTS
from trajectory_manager.store.errors import unwrap
from trajectory_manager.store.redis import keys
from trajectory_manager.store.redis.run_scripts import RunScripts

MAX_COLUMN_TRIES = 3
"""Tries of consumers to compute one column of a sample, before the sample is replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnLease:
    """Samples whose column a consumer computes."""

    sample_ids: tuple[str, ...]
    """Those of complete groups in the order these completed, then those of others, oldest first."""
    epoch: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedCells:
    """What became of the samples of a lease; the others are written."""

    unwritten: tuple[str, ...]
    """Samples whose cell is leased under its epoch."""
    unneeded: tuple[str, ...]
    """Samples whose group is committed or discarded."""


class CellFailure(NamedTuple):
    message: str
    counts: bool
    """Whether it is the sample's fault; such tries are limited."""


class ColumnStore(RunScripts):
    """Cells and values; NOT_FOUND for a run not created. Each method is one atomic step."""

    async def lease(
        self, run_id: str, column: str, needs: Sequence[str], max_samples: int, nonce: str
    ) -> ColumnLease | None:
        """Lease the first queued cells of `column` whose samples have all columns in `needs`.

        A call with the nonce of a lease that still holds cells gets these cells again.
        """
        reply = await self._call("lease_cells", run_id, column, max_samples, nonce, *needs)
        if not reply:
            return None
        epoch, seconds, sample_ids = reply
        return ColumnLease(sample_ids=_texts(sample_ids), epoch=int(epoch), seconds=float(seconds))

    async def leased(
        self, run_id: str, column: str, epoch: int, sample_ids: Sequence[str]
    ) -> LeasedCells:
        """What became of samples that were leased under `epoch`.

        Raises:
            ServiceError: LEASE_EXPIRED for a queued cell, or one under another lease.
        """
        unwritten, unneeded = await self._call(
            "list_leased_cells", run_id, column, epoch, *dict.fromkeys(sample_ids)
        )
        return LeasedCells(unwritten=_texts(unwritten), unneeded=_texts(unneeded))

    async def put(
        self, run_id: str, column: str, epoch: int, values: Mapping[str, bytes], *, new: bool
    ) -> None:
        """Store values by sample, or if not `new` check that they are stored. Idempotent.

        Atomic for each sample; an error may leave some of them stored.

        Raises:
            ServiceError: LEASE_EXPIRED (a newer lease wrote), ALREADY_EXISTS (other values
                under the same lease), NOT_FOUND (the rollout).
        """
        calls = []
        for sample_id, value in values.items():
            name = rollout_of(sample_id)
            args = (name, column, sample_id, epoch, int(new), value)
            calls.append((keys.column_keys(run_id, name), args))
        for reply in await self._scripts.call_many("write_cell", calls):
            unwrap(reply)

    async def complete(
        self, run_id: str, column: str, epoch: int, sample_ids: Sequence[str]
    ) -> pb.WriteColumnResponse:
        """Mark cells whose values are stored as written, all or none. Idempotent.

        Cells of a group that is ready or discarded are deleted already, and skipped.

        Raises:
            ServiceError: LEASE_EXPIRED for a cell that `epoch` does not hold.
        """
        num_written, num_ready = await self._call(
            "complete_cells", run_id, column, epoch, *dict.fromkeys(sample_ids)
        )
        return pb.WriteColumnResponse(num_written=num_written, num_ready_groups=num_ready)

    async def give_back(
        self, run_id: str, column: str, epoch: int, sample_ids: Sequence[str]
    ) -> int:
        """Queue those of the cells again that `epoch` holds; how many. Idempotent."""
        (number,) = await self._call("return_cells", run_id, column, epoch, *sample_ids)
        return int(number)

    async def fail(
        self, run_id: str, column: str, epoch: int, failures: Mapping[str, CellFailure]
    ) -> int:
        """Queue those of the cells that `epoch` holds behind the others, with a try that failed.

        A sample on which MAX_COLUMN_TRIES failed is replaced, as that of a failed rollout is: its
        group goes on, or becomes a dead letter with this message. Idempotent.

        Args:
            failures: by sample.

        Returns:
            How many samples were replaced.
        """
        args: list[Any] = [MAX_COLUMN_TRIES, MAX_REPLACEMENTS, MAX_DEAD_LETTERS]
        for sample_id, failure in failures.items():
            args += sample_id, failure.message, int(failure.counts)
        (number,) = await self._call("fail_cells", run_id, column, epoch, *args)
        return int(number)

    async def backlog(self, run_id: str, column: str) -> pb.GetColumnBacklogResponse:
        """What there is to compute of a column, and what may still come."""
        lacking, running = await self._call("count_lacking_cells", run_id, column)
        return pb.GetColumnBacklogResponse(num_samples=lacking, num_running_rollouts=running)

    async def read(self, run_id: str, sample_ids: Sequence[str]) -> dict[str, Mapping[str, bytes]]:
        """Values by sample and column, also of cells that are not completed."""
        rollout_ids = list(dict.fromkeys(map(rollout_of, sample_ids)))
        replies = await self._scripts.call_many(
            "read_cells", [(keys.column_keys(run_id, name), ()) for name in rollout_ids]
        )
        values: dict[str, dict[str, bytes]] = {name: {} for name in sample_ids}
        for reply in replies:
            (pairs,) = unwrap(reply)
            for field, stored in zip(pairs[::2], pairs[1::2], strict=True):
                column, sample_id = field.decode().split(" ")
                if sample_id in values:
                    values[sample_id][column] = stored.partition(b":")[2]
        return {**values}

    async def status(self, run_id: str, after: str, limit: int) -> list[pb.SampleStatus]:
        """Samples of the first `limit` uncommitted groups that have some, by name after `after`."""
        (rows,) = await self._call("list_sample_columns", run_id, after, limit)
        return [
            pb.SampleStatus(
                sample_id=sample_id.decode(),
                group_id=group_id.decode(),
                ready_columns=_texts(ready),
                leased_columns=_texts(leased),
                leased_step=int(step),
            )
            for sample_id, group_id, step, ready, leased in rows
        ]


def _texts(names: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(name.decode() for name in names)


def rollout_of(sample_id: str) -> str:
    return sample_id.rpartition("#")[0]
