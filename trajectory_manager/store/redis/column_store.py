"""ColumnStore on Redis: cells live with their run, values with their rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.chassis.errors import ServiceError
from services.chassis.redis.scripts import Scripts
from trajectory_manager.store.column_interface import (
    MAX_COLUMN_TRIES,
    Backlog,
    CellFailure,
    ColumnLease,
    ColumnsWritten,
    LeasedCells,
    SampleColumns,
    rollout_of,
)
from trajectory_manager.store.errors import unwrap
from trajectory_manager.store.interface import MAX_DEAD_LETTERS, MAX_REPLACEMENTS
from trajectory_manager.store.redis import keys


class RedisColumnStore:
    """Implements `ColumnStore`."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def lease(
        self, run_id: str, column: str, needs: Sequence[str], max_samples: int, nonce: str
    ) -> ColumnLease | None:
        """Lease the first queued cells whose samples have the columns in `needs`."""
        reply = await self._call("lease_cells", run_id, column, max_samples, nonce, *needs)
        if not reply:
            return None
        epoch, seconds, sample_ids = reply
        return ColumnLease(sample_ids=_texts(sample_ids), epoch=int(epoch), seconds=float(seconds))

    async def leased(
        self, run_id: str, column: str, epoch: int, sample_ids: Sequence[str]
    ) -> LeasedCells:
        """What became of samples that were leased under `epoch`."""
        unwritten, unneeded = await self._call(
            "list_leased_cells", run_id, column, epoch, *dict.fromkeys(sample_ids)
        )
        return LeasedCells(unwritten=_texts(unwritten), unneeded=_texts(unneeded))

    async def put(
        self, run_id: str, column: str, epoch: int, values: Mapping[str, bytes], *, new: bool
    ) -> None:
        """Store values by sample, or check that they are stored."""
        calls = []
        for sample_id, value in values.items():
            name = rollout_of(sample_id)
            args = (name, column, sample_id, epoch, int(new), value)
            calls.append((keys.column_keys(run_id, name), args))
        for reply in await self._scripts.call_many("write_cell", calls):
            _unwrap(reply)

    async def complete(
        self, run_id: str, column: str, epoch: int, sample_ids: Sequence[str]
    ) -> ColumnsWritten:
        """Mark leased cells as written, all or none."""
        num_written, num_ready = await self._call(
            "complete_cells", run_id, column, epoch, *dict.fromkeys(sample_ids)
        )
        return ColumnsWritten(num_written=num_written, num_ready_groups=num_ready)

    async def give_back(
        self, run_id: str, column: str, epoch: int, sample_ids: Sequence[str]
    ) -> int:
        """Queue those of the cells again that `epoch` holds; how many."""
        (number,) = await self._call("return_cells", run_id, column, epoch, *sample_ids)
        return int(number)

    async def fail(
        self, run_id: str, column: str, epoch: int, failures: Mapping[str, CellFailure]
    ) -> int:
        """Queue those of the cells again that `epoch` holds; how many samples were replaced."""
        args: list[Any] = [MAX_COLUMN_TRIES, MAX_REPLACEMENTS, MAX_DEAD_LETTERS]
        for sample_id, failure in failures.items():
            args += sample_id, failure.message, int(failure.counts)
        (number,) = await self._call("fail_cells", run_id, column, epoch, *args)
        return int(number)

    async def backlog(self, run_id: str, column: str) -> Backlog:
        """What there is to compute of a column, and what may still come."""
        lacking, running = await self._call("count_lacking_cells", run_id, column)
        return Backlog(num_samples=lacking, num_running_rollouts=running)

    async def read(self, run_id: str, sample_ids: Sequence[str]) -> dict[str, Mapping[str, bytes]]:
        """Values by sample and column."""
        rollout_ids = list(dict.fromkeys(map(rollout_of, sample_ids)))
        replies = await self._scripts.call_many(
            "read_cells", [(keys.column_keys(run_id, name), ()) for name in rollout_ids]
        )
        values: dict[str, dict[str, bytes]] = {name: {} for name in sample_ids}
        for reply in replies:
            (pairs,) = _unwrap(reply)
            for field, stored in zip(pairs[::2], pairs[1::2], strict=True):
                column, sample_id = field.decode().split(" ")
                if sample_id in values:
                    values[sample_id][column] = stored.partition(b":")[2]
        return {**values}

    async def status(self, run_id: str, after: str, limit: int) -> list[SampleColumns]:
        """Samples of uncommitted groups and their columns."""
        (rows,) = await self._call("list_sample_columns", run_id, after, limit)
        return [
            SampleColumns(
                sample_id=sample_id.decode(),
                group_id=group_id.decode(),
                ready=_texts(ready),
                leased=_texts(leased),
                step=int(step),
            )
            for sample_id, group_id, step, ready, leased in rows
        ]

    async def _call(self, script: str, run_id: str, *args: Any) -> list[Any]:
        reply = await self._scripts.call(script, keys=keys.run_keys(run_id), args=[run_id, *args])
        return unwrap(reply)


def _unwrap(reply: Any) -> list[Any]:
    if isinstance(reply, ServiceError):
        raise reply
    return unwrap(reply)


def _texts(names: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(name.decode() for name in names)
