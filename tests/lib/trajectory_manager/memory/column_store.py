"""In-memory ColumnStore: the reference the Redis one is tested against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from seamflow.trajectory.v1 import column_service_pb2 as pb

from tests.lib.trajectory_manager.memory.run_state import Cell, Runs, RunState
from trajectory_manager.model.records import Purpose, RolloutResult, SlotName, Topic
from trajectory_manager.store.errors import store_error
from trajectory_manager.store.redis.column_store import (
    MAX_COLUMN_TRIES,
    CellFailure,
    ColumnLease,
    ColumnStore,
    LeasedCells,
    rollout_of,
)
from trajectory_manager.store.redis.token_store import TokenStore


class MemoryColumnStore(ColumnStore):
    """Implements `ColumnStore`; nothing survives the process."""

    def __init__(self, runs: Runs, tokens: TokenStore, clock: Callable[[], float]) -> None:
        """`clock` gives Unix seconds."""
        self._runs = runs
        self._tokens = tokens
        self._clock = clock
        self._values: dict[tuple[str, str], dict[tuple[str, str], tuple[int, bytes]]] = {}

    async def lease(
        self, run_id: str, column: str, needs: Sequence[str], max_samples: int, nonce: str
    ) -> ColumnLease | None:
        """See `ColumnStore`."""
        run, now = self._runs.get(run_id), self._clock()
        if held := self._held(run, column, nonce):
            return held
        free = [
            (sample_id, cell)
            for (name, sample_id), cell in _queue(run)
            if name == column
            and not cell.written
            and cell.expires <= now
            and all(run.cells[need, sample_id].written for need in needs)
        ][:max_samples]
        if not free:
            return None
        run.column_epoch = max(run.column_epoch + 1, int(now * 1000))
        for _, cell in free:
            cell.epoch, cell.expires = run.column_epoch, now + run.config.lease_seconds
        run.column_requests.setdefault(nonce, set()).add(run.column_epoch)
        return ColumnLease(
            sample_ids=tuple(sample_id for sample_id, _ in free),
            epoch=run.column_epoch,
            seconds=run.config.lease_seconds,
        )

    def _held(self, run: RunState, column: str, nonce: str) -> ColumnLease | None:
        """What the lease of `nonce` still holds."""
        now, epochs = self._clock(), run.column_requests.get(nonce, set())
        held = {
            sample_id: cell
            for (name, sample_id), cell in _queue(run)
            if name == column and cell.epoch in epochs and not cell.written and cell.expires > now
        }
        if not held:
            return None
        seconds = round(max(cell.expires for cell in held.values()) - now, 3)
        (epoch,) = {cell.epoch for cell in held.values()}
        return ColumnLease(sample_ids=tuple(held), epoch=epoch, seconds=seconds)

    async def leased(
        self, run_id: str, column: str, epoch: int, sample_ids: Sequence[str]
    ) -> LeasedCells:
        """See `ColumnStore`."""
        run = self._runs.get(run_id)
        unneeded = [name for name in sample_ids if _is_unneeded(run, column, name)]
        unwritten = self._open(run, column, epoch, sample_ids)
        return LeasedCells(unwritten=tuple(unwritten), unneeded=tuple(unneeded))

    def _open(
        self, run: RunState, column: str, epoch: int, sample_ids: Sequence[str]
    ) -> dict[str, Cell]:
        """The cells that are leased under `epoch`; the others are written under it, or gone."""
        found: dict[str, Cell] = {}
        for sample_id in sample_ids:
            cell = run.cells.get((column, sample_id))
            if cell is None or (cell.written and cell.epoch == epoch):
                continue
            if cell.written or cell.epoch != epoch or cell.expires <= self._clock():
                raise store_error("LOST_COLUMN", column, sample_id)
            found[sample_id] = cell
        return found

    async def put(
        self, run_id: str, column: str, epoch: int, values: Mapping[str, bytes], *, new: bool
    ) -> None:
        """See `ColumnStore`."""
        for sample_id, value in values.items():
            await self._put(run_id, column, epoch, sample_id, value, new)

    async def _put(
        self, run_id: str, column: str, epoch: int, sample_id: str, value: bytes, new: bool
    ) -> None:
        rollout_id = rollout_of(sample_id)
        if await self._tokens.rollout(run_id, rollout_id) is None:
            raise store_error("UNKNOWN_ROLLOUT", rollout_id)
        of_rollout = self._values.setdefault((run_id, rollout_id), {})
        stored = of_rollout.get((column, sample_id), (0, b""))
        if stored[0] > epoch or (stored[0] < epoch and not new):
            raise store_error("LOST_COLUMN", column, sample_id)
        if stored[0] == epoch and stored[1] != value:
            raise store_error("OTHER_COLUMN", column, sample_id)
        of_rollout[column, sample_id] = (epoch, value)

    async def complete(
        self, run_id: str, column: str, epoch: int, sample_ids: Sequence[str]
    ) -> pb.WriteColumnResponse:
        """See `ColumnStore`."""
        run, num_ready = self._runs.get(run_id), 0
        cells = self._open(run, column, epoch, sample_ids)
        for sample_id, cell in cells.items():
            cell.written = True
            num_ready += self._makes_ready(run, sample_id)
        if cells:
            run.column_failures.pop(column, None)
            run.changed(Topic.COLUMNS)
        return pb.WriteColumnResponse(num_written=len(cells), num_ready_groups=num_ready)

    def _makes_ready(self, run: RunState, sample_id: str) -> bool:
        """Whether the group of the sample, whose cell is written, became ready."""
        name = SlotName.parse(rollout_of(sample_id))
        assert name is not None, "a cell belongs to a leased rollout"
        group = run.groups[name.task_id]
        if not group.complete or run.lacking_cells(group):
            return False
        run.num_incomplete -= 1
        run.drop_cells(group)
        run.ready.append(name.task_id)
        run.changed(Topic.READY)
        return True

    async def give_back(
        self, run_id: str, column: str, epoch: int, sample_ids: Sequence[str]
    ) -> int:
        """See `ColumnStore`."""
        run = self._runs.get(run_id)
        found = [run.cells.get((column, name)) for name in sample_ids]
        held = [cell for cell in found if cell and cell.epoch == epoch and not cell.written]
        for cell in held:
            cell.epoch, cell.expires = 0, 0.0
        if held:
            run.changed(Topic.COLUMNS)
        return len(held)

    async def fail(
        self, run_id: str, column: str, epoch: int, failures: Mapping[str, CellFailure]
    ) -> int:
        """See `ColumnStore`."""
        run, num_replaced = self._runs.get(run_id), 0
        for sample_id, failure in failures.items():
            cell = run.cells.get((column, sample_id))
            if cell is None or cell.epoch != epoch or cell.written or cell.expires <= self._clock():
                continue
            run.column_failures[column] = failure.message
            run.num_column_failures += 1
            cell.tries += failure.counts
            if cell.tries < MAX_COLUMN_TRIES:
                run.num_cell_places += 1
                cell.epoch, cell.expires = 0, 0.0
                cell.place = cell.place[0], run.num_cell_places
            else:
                self._give_up(run, sample_id, failure.message)
                num_replaced += 1
            run.changed(Topic.COLUMNS)
        return num_replaced

    def _give_up(self, run: RunState, sample_id: str, message: str) -> None:
        name = SlotName.parse(rollout_of(sample_id))
        assert name is not None, "a cell belongs to a leased rollout"
        group = run.groups[name.task_id]
        run.num_incomplete -= group.complete
        slot = group.slots[name.slot]
        assert slot.result is not None, "a cell belongs to a finished rollout"
        for lost in slot.result.sample_ids:
            for column in run.config.required_columns:
                run.cells.pop((column, lost), None)
        slot.result = None
        result = RolloutResult(
            rollout_id=rollout_of(sample_id), finished=False, failure_message=message
        )
        run.replace(group, name, result, self._clock())

    async def backlog(self, run_id: str, column: str) -> pb.GetColumnBacklogResponse:
        """See `ColumnStore`."""
        run = self._runs.get(run_id)
        lacking = [name for (name, _), cell in run.cells.items() if not cell.written]
        running = sum(not lease.surplus for lease in run.leases.values())
        return pb.GetColumnBacklogResponse(
            num_samples=lacking.count(column), num_running_rollouts=running
        )

    async def read(self, run_id: str, sample_ids: Sequence[str]) -> dict[str, Mapping[str, bytes]]:
        """See `ColumnStore`."""
        found: dict[str, Mapping[str, bytes]] = {}
        for sample_id in sample_ids:
            of_rollout = self._values.get((run_id, rollout_of(sample_id)), {})
            found[sample_id] = {
                column: values
                for (column, name), (_, values) in of_rollout.items()
                if name == sample_id
            }
        return found

    async def status(self, run_id: str, after: str, limit: int) -> list[pb.SampleStatus]:
        """See `ColumnStore`."""
        run = self._runs.get(run_id)
        steps = {name: step for step, entry in run.ledger.items() for name in entry.groups}
        names = sorted(
            name
            for name, group in run.groups.items()
            if name > after and group.task.purpose is Purpose.TRAIN and group.sample_ids
        )
        return [
            self._row(run, task_id, sample_id, steps.get(task_id, 0))
            for task_id in names[:limit]
            for sample_id in run.groups[task_id].sample_ids
        ]

    def _row(self, run: RunState, task_id: str, sample_id: str, step: int) -> pb.SampleStatus:
        written, leased = [], []
        for column in run.config.required_columns:
            cell = run.cells.get((column, sample_id))
            if cell is None or cell.written:
                written.append(column)
            elif cell.expires > self._clock():
                leased.append(column)
        return pb.SampleStatus(
            sample_id=sample_id,
            group_id=task_id,
            ready_columns=written,
            leased_columns=leased,
            leased_step=step,
        )

    def forget(self, run_id: str, rollout_id: str) -> None:
        """Drop all values of a rollout that is deleted."""
        self._values.pop((run_id, rollout_id), None)

    def forget_run(self, run_id: str) -> None:
        """Drop all values of a run."""
        for key in [key for key in self._values if key[0] == run_id]:
            del self._values[key]


def _queue(run: RunState) -> list[tuple[tuple[str, str], Cell]]:
    return sorted(run.cells.items(), key=lambda item: item[1].place)


def _is_unneeded(run: RunState, column: str, sample_id: str) -> bool:
    name = SlotName.parse(rollout_of(sample_id))
    if name is None or (column, sample_id) in run.cells:
        return False
    group = run.groups.get(name.task_id)
    if group is None or name.slot >= len(group.slots):
        return True
    slot = group.slots[name.slot]
    return slot.attempt != name.attempt or slot.result is None
