"""Which leases of tasks are held, and why there is none, in memory."""

from __future__ import annotations

from tests.lib.trajectory_manager.memory.run_state import LeaseState, RunState
from trajectory_manager.model.records import EmptyReason, SlotName, TaskLease


def held(run: RunState, rollout_id: str, nonce: str, now: float) -> LeaseState | None:
    """The lease of a rollout, if this nonce proves it and it has not ended."""
    lease = run.leases.get(rollout_id)
    if lease is None or lease.surplus or lease.nonce != nonce:
        return None
    return lease if lease.expires > now else None


def repeated(run: RunState, nonce: str, now: float) -> TaskLease | None:
    """The lease that has this nonce, renewed, while it is held."""
    for rollout_id in run.leases:
        if (lease := held(run, rollout_id, nonce, now)) is None:
            continue
        seconds, name = run.config.lease_seconds, SlotName.parse(rollout_id)
        assert name is not None, "what is leased is a slot"
        lease.expires = now + seconds
        task = run.groups[name.task_id].task
        return TaskLease(task=task, rollout_id=rollout_id, nonce=nonce, seconds=seconds)
    return None


def closed_by(run: RunState) -> EmptyReason:
    """Why no TRAIN group is admitted."""
    if run.num_outstanding < run.max_outstanding:
        return EmptyReason.STORE_FULL
    return EmptyReason.ADMISSION_CLOSED
