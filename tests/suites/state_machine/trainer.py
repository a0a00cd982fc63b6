"""Rules of the trainer and of those who compute columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from services.chassis.errors import ServiceError
from tests.suites.state_machine.base import COLUMNS, LOST, PICK, RUN_ID, Base, picked
from trajectory_manager.store.redis.column_store import CellFailure
from trajectory_manager.store.redis.inspection_store import TrainedRecord

PROGRESS: dict[str, Any] = {"number": st.integers(1, 3), "commit": st.booleans()}
STALE = st.sampled_from([False] * 9 + [True])


@dataclass(frozen=True, slots=True)
class Cells:
    """A column lease in a consumer's hands."""

    column: str
    epoch: int
    sample_ids: tuple[str, ...]


class Trainer(Base):
    """Steps are leased, committed, restored; columns are computed."""

    num_trainers = 0
    consumed: frozenset[str] = frozenset()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.leases: dict[int, tuple[str, ...]] = {}

    def fence(self, stale: bool) -> int:
        """The trainer's epoch, or one of a trainer that was replaced."""
        return self.epochs[-2] if stale else self.epoch

    @rule(
        ahead=st.sampled_from([1, 1, 1, 0, -1, 2]),
        base=st.integers(0, 2),
        stale=STALE,
        lost=LOST,
        groups=st.sampled_from([0, 0, 1, 9]),
        least=st.sampled_from([0, 0, 1, 2]),
        streaming=st.sampled_from([False, False, True]),
    )
    def train(
        self,
        ahead: int,
        base: int,
        stale: bool,
        lost: bool,
        groups: int,
        least: int,
        streaming: bool,
    ) -> None:
        """A trainer asks for the next step, for one it has, or for one that is not next."""
        step = max(1, self.step + ahead)
        base = max(0, step - 1 + base - 1)
        asked = (RUN_ID, self.fence(stale), step, base, groups, least, streaming)
        attempt = self.both(
            lambda on: on.store.ledger.lease_samples(*asked), lost=lost, stable=_lease
        )
        lease = getattr(attempt, "lease", None)
        if lease is None:
            return
        assert not self.consumed & set(lease.sample_ids), "a sample is in two committed steps"
        self.delivered.add(step)
        self.leases[step] = (*lease.sample_ids, *lease.replayed_ids)
        self.step = max(self.step, step)

    @rule(**PROGRESS)
    def progress(self, number: int, commit: bool) -> None:
        """A trainer takes what is ready, of an open step first, and may commit it."""
        for _ in range(number):
            step = self.step
            for ahead in (0, 1):
                self.train(ahead, 1, False, False, groups=0, least=0, streaming=False)
            if self.step == step:
                return
            if commit:
                self.commit(0, stale=False, lost=False)

    @rule(behind=st.integers(-1, 2), stale=STALE, lost=LOST)
    def commit(self, behind: int, stale: bool, lost: bool) -> None:
        """A checkpoint covers steps."""
        step, epoch = max(0, self.step - behind), self.fence(stale)
        held = self.leased_samples(step)
        answer = self.both(lambda on: on.store.ledger.commit(RUN_ID, epoch, step), lost=lost)
        if not isinstance(answer, ServiceError):
            self.consume(step, held)

    @rule(behind=st.integers(-1, 2), kept=st.integers(1, 2), stale=STALE, lost=LOST)
    def record_trained(self, behind: int, kept: int, stale: bool, lost: bool) -> None:
        """A trainer says what it trained on."""
        step, epoch = max(1, self.step - behind), self.fence(stale)
        names = self.leases.get(step) or ("task-0/0/1#t",)
        records = [TrainedRecord(sample_id=n, summary=b"s", tokens=b"t") for n in names]
        asked = (RUN_ID, epoch, step, records, kept)
        self.both(lambda on: on.store.inspection.record_trained(*asked), lost=lost)

    def leased_samples(self, step: int) -> set[str]:
        """The samples of steps up to this one."""
        rows = self.wait(self.pair.model.store.columns.status(RUN_ID, "", 9999))
        return {row.sample_id for row in rows if 0 < row.leased_step <= step}

    def consume(self, step: int, sample_ids: set[str]) -> None:
        """These are trained for good."""
        self.consumed |= sample_ids
        self.committed = max(self.committed, step)
        self.delivered = {later for later in self.delivered if later > step}

    @rule(behind=st.integers(-1, 2), number=PICK, stale=STALE, lost=LOST)
    def reject(self, behind: int, number: int, stale: bool, lost: bool) -> None:
        """A trainer cannot train a group of a step, fresh or replayed."""
        step, epoch = max(1, self.step - behind), self.fence(stale)
        names = self.leases.get(step) or ("task-0/0/1#t",)
        group = picked(names, number).rsplit("/", 2)[0]
        asked = (RUN_ID, epoch, step, {group: "a reward of 1e308"})
        answer = self.both(lambda on: on.store.ledger.reject(*asked), lost=lost, stable=_is_open)
        if not isinstance(answer, ServiceError) and answer.open:
            self.step = step
            self.delivered = {earlier for earlier in self.delivered if earlier <= step}

    @rule(again=st.booleans(), behind=st.integers(-1, 2), old=PICK, lost=LOST)
    def replace_trainer(self, again: bool, behind: int, old: int, lost: bool) -> None:
        """A trainer comes with its checkpoint, a newer, an older one; or comes back too late."""
        self.num_trainers += not again
        name = self.num_trainers if old > 99 else old % (self.num_trainers + 1)
        step = max(0, self.committed - behind)
        held = self.leased_samples(step)
        before = self.epoch
        self.take_over(f"trainer-{name}", step, lost=lost)
        if self.epoch >= before and self.committed == step:
            self.consumed |= held

    @rule(ahead=st.integers(-1, 2), publish=st.booleans(), stale=STALE, lost=LOST)
    def ask(self, ahead: int, publish: bool, stale: bool, lost: bool) -> None:
        """A trainer is slow; or has newer weights, which wait for what they would make too old."""
        asked = (RUN_ID, self.fence(stale), max(0, self.step + ahead))
        if publish:
            self.both(lambda on: on.store.ledger.publish_wait(*asked))
        else:
            self.both(lambda on: on.store.ledger.extend_samples(*asked), lost=lost)


class Consumers(Base):
    """Columns are leased, computed, written."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.cells: list[Cells] = []
        self.num_requests = 0

    @precondition(lambda self: self.config.required_columns)
    @rule(
        column=st.sampled_from(COLUMNS),
        needs=st.booleans(),
        number=st.integers(1, 3),
        lost=LOST,
        again=st.booleans(),
    )
    def lease_column(
        self, column: str, needs: bool, number: int, lost: bool, again: bool = False
    ) -> None:
        """A consumer asks for samples, maybe again, with or without another column."""
        wanted = [COLUMNS[0]] if needs and column == COLUMNS[1] else []
        wanted = [name for name in wanted if name in self.config.required_columns]
        self.num_requests += not again
        nonce = f"request-{self.num_requests}"
        lease = self.both(lambda on: on.store.columns.lease(RUN_ID, column, wanted, number, nonce))
        if lease is not None and not lost:
            self.cells.append(Cells(column, lease.epoch, lease.sample_ids))

    @precondition(lambda self: self.config.required_columns)
    @rule()
    def compute_columns(self) -> None:
        """Consumers compute all there is to compute."""
        for column in self.config.required_columns:
            self.lease_column(column, needs=True, number=9, lost=False)
            if self.cells:
                self.write_column(-1, b"aaaa", True, False, True, lost=False)

    @precondition(lambda self: self.cells)
    @rule(
        number=PICK,
        value=st.sampled_from([b"aaaa", b"aaaa", b"bbbb"]),
        new=st.booleans(),
        part=st.booleans(),
        complete=st.booleans(),
        lost=LOST,
    )
    def write_column(
        self, number: int, value: bytes, new: bool, part: bool, complete: bool, lost: bool
    ) -> None:
        """Values are stored, and then their cells are complete."""
        cells = picked(self.cells, number)
        names = cells.sample_ids[:1] if part else cells.sample_ids
        about = (RUN_ID, cells.column, cells.epoch)
        self.both(lambda on: on.store.columns.leased(*about, names), lost=lost)
        for name in names:
            self._put(about, {name: value}, new, lost)
        if complete:
            self.both(lambda on: on.store.columns.complete(*about, names), lost=lost, stable=type)

    @precondition(lambda self: self.cells)
    @rule(number=PICK, part=st.booleans(), lost=LOST)
    def return_cells(self, number: int, part: bool, lost: bool) -> None:
        """A consumer stops before it has computed what it leased."""
        cells = picked(self.cells, number)
        names = cells.sample_ids[:1] if part else cells.sample_ids
        about = (RUN_ID, cells.column, cells.epoch)
        self.both(lambda on: on.store.columns.give_back(*about, names), lost=lost, stable=type)

    @precondition(lambda self: self.cells)
    @rule(number=PICK, part=st.booleans(), tries=st.integers(1, 3), fault=st.booleans(), lost=LOST)
    def fail_cells(self, number: int, part: bool, tries: int, fault: bool, lost: bool) -> None:
        """A consumer cannot compute what it leased, perhaps again and again."""
        cells = picked(self.cells, number)
        for _ in range(tries):
            names = cells.sample_ids[:1] if part else cells.sample_ids
            about, why = (
                (RUN_ID, cells.column, cells.epoch),
                dict.fromkeys(names, CellFailure("why", fault)),
            )
            self.both(lambda on: on.store.columns.fail(*about, why), lost=lost, stable=type)  # noqa: B023
            self.lease_column(cells.column, needs=False, number=3, lost=False)
            cells = self.cells[-1]

    def _put(
        self, about: tuple[str, str, int], values: dict[str, bytes], new: bool, lost: bool
    ) -> None:
        self.both(lambda on: on.store.columns.put(*about, values, new=new), lost=lost)


def _is_open(rejected: Any) -> Any:
    return getattr(rejected, "open", rejected)


def _lease(attempt: Any) -> Any:
    return getattr(attempt, "lease", attempt)
