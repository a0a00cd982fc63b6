"""Rules of agents that lease by name or again, and of the operator who ends the run."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.suites.state_machine.agents import PURPOSES, Agents
from tests.suites.state_machine.base import LOST, PICK, RUN_ID, picked
from trajectory_manager.model.records import Purpose, Task, TaskLease


class OwnLeases(Agents):
    """Leases of agents' own tasks, and repeated calls."""

    @rule(number=st.integers(1, 2), size=st.sampled_from([2, 2, 2, 1]), lost=LOST)
    def lease_own(self, number: int, size: int, lost: bool) -> None:
        """An agent leases a rollout of its own task."""
        self.num_nonces += 1
        nonce, name = f"nonce-{self.num_nonces}", f"own-{number}"
        train = Purpose.TRAIN
        task = Task(task_id=name, payload_json="{}", num_samples=size, purpose=train, own=True)
        held = self.took(self.both(lambda on: on.store.runs.lease_own_task(RUN_ID, task, nonce)))
        if lost and held is not None:
            self.held.pop()

    @precondition(lambda self: self.held)
    @rule(number=PICK, purposes=st.sampled_from(PURPOSES))
    def lease_again(self, number: int, purposes: tuple[Purpose, ...]) -> None:
        """An agent repeats a call: it gets its lease, or another one if that is over."""
        nonce = picked(self.held, number).nonce
        if not nonce:
            return
        lease = self.both(lambda on: on.store.runs.lease_task(RUN_ID, purposes, nonce))
        if isinstance(lease, TaskLease) and lease.rollout_id not in self.names:
            self.took(lease)

    @rule(chance=st.sampled_from([False] * 9 + [True]))
    def end_run(self, chance: bool) -> None:
        """An operator ends the run, until a trainer comes."""
        if chance:
            self.both(lambda on: on.store.runs.end_run(RUN_ID))
