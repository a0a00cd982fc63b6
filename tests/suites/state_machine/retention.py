"""Rules of those who keep a run in order: retention, dead letters, recorded groups."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from seamflow.trajectory.v1.trajectory_service_pb2 import SearchRolloutsRequest

from services.chassis.errors import ServiceError
from tests.lib.trajectory_manager.support import rewarded
from tests.suites.state_machine.agents import spans_of
from tests.suites.state_machine.base import LOST, PICK, RUN_ID, STEPS, Base, picked
from trajectory_manager.model.records import Purpose, Rollout, RolloutState, SlotName, Task
from trajectory_manager.model.tokens import Turn
from trajectory_manager.service.rollout_index import RolloutSearch


class Keepers(Base):
    """What is dead is tried again, what was exported comes back, what is old goes."""

    @rule(numbers=st.lists(PICK, min_size=1, max_size=2), lost=LOST)
    def requeue(self, numbers: list[int], lost: bool) -> None:
        """Dead letters are requeued."""
        names = [f"task-{number % (self.num_tasks + 1)}" for number in numbers]
        self.both(lambda on: on.store.runs.requeue(RUN_ID, names), lost=lost, stable=type)

    @rule(number=st.integers(1, 4), size=st.integers(1, 2), version=st.integers(0, 2), lost=LOST)
    def record(self, number: int, size: int, version: int, lost: bool) -> None:
        """Groups of an exported run are recorded, and again."""
        task = Task(
            task_id=f"old-{number}",
            payload_json="{}",
            num_samples=size,
            purpose=Purpose.TRAIN,
        )
        admitted = self.both(
            lambda on: on.store.runs.admit_recorded(RUN_ID, [task]),
            lost=lost,
            stable=lambda answer: getattr(answer, "num_free", answer),
        )
        names = [str(SlotName(task.task_id, slot, 1)) for slot in range(size)]
        if isinstance(admitted, ServiceError):
            return
        self.names.update(names)
        for name in names[: 1 + number % 2]:
            self._record(name, version)

    def _record(self, name: str, version: int) -> None:
        turn = Turn(
            turn_id="t0",
            attempt_id="-",
            prompt_digest="digest",
            finish_reason=1,
            tokens=spans_of([1, 2, 3], 2, version),
        )
        rollout = Rollout(
            run_id=RUN_ID,
            rollout_id=name,
            purpose=Purpose.TRAIN,
            group_id=name.partition("/")[0],
            state=RolloutState.FINISHED,
            outcome=rewarded(version / 2),
        )
        self.flow(lambda rollouts, _, on: rollouts.record(RUN_ID, [(rollout, [turn])]))

    @rule(steps=STEPS)
    def retain(self, steps: int | None) -> None:
        """The sweeper deletes what is past its time."""
        self.flow(lambda _, retention, on: retention.sweep(RUN_ID), steps)

    @precondition(lambda self: self.names)
    @rule(numbers=st.lists(PICK, min_size=1, max_size=3), steps=STEPS)
    def delete(self, numbers: list[int], steps: int | None) -> None:
        """Rollouts are deleted on request."""
        names = [picked(sorted(self.names), number) for number in numbers]
        self.flow(lambda _, retention, on: retention.delete(RUN_ID, names), steps)

    @rule(most=st.integers(2, 6), lost=LOST)
    def trim(self, most: int, lost: bool) -> None:
        """The sweeper drops rows of the index."""
        self.both(lambda on: on.store.inspection.trim(RUN_ID, most), lost=lost)

    @rule(limit=st.integers(1, 3), least=st.integers(0, 1), lost=LOST)
    def search(self, limit: int, least: int, lost: bool) -> None:
        """Somebody looks for rollouts, and rows that were missing are added."""
        wanted = SearchRolloutsRequest(min_reward=least or None)
        self.both(lambda on: RolloutSearch(on.store).newest(RUN_ID, wanted, 0, limit), lost=lost)

    @rule(delta=st.integers(-10, 10))
    def count_tokens(self, delta: int) -> None:
        """A manager counts tokens; alone of all operations this one is not idempotent."""
        self.both(lambda on: on.store.runs.add_stored_tokens(RUN_ID, delta))
