"""A run whose rollouts are settled by hand, without tokens, and its trainer."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from seamflow.trajectory.v1.sample_service_pb2 import RejectGroupsResponse

from tests.lib.trajectory_manager.support import RULES
from trajectory_manager.model.records import EmptyReason, Purpose, RolloutResult, Task, TaskLease
from trajectory_manager.model.runs import LeaseAttempt, PublishWait, RunConfig, StepLease
from trajectory_manager.store.redis.connect import Store

WIDE = replace(RULES, group_size=1, groups_per_step=2, max_staleness=9)
"""Groups of one sample, as many ahead as a test needs."""


@dataclass(slots=True)
class Ledger:
    """A run on a store, seen from its trainer."""

    store: Store
    run_id: str
    epoch: int = 0
    pending: tuple[int, ...] = ()
    num_samples: int = 2
    running: dict[str, list[str]] = field(default_factory=dict)
    nonces: dict[str, str] = field(default_factory=dict)

    async def admit(self, *task_ids: str) -> None:
        """Submit the tasks and lease all their rollouts."""
        tasks = [
            Task(
                task_id=name,
                payload_json="{}",
                num_samples=self.num_samples,
                purpose=Purpose.TRAIN,
            )
            for name in task_ids
        ]
        await self.store.runs.submit(self.run_id, tasks, 100_000)
        while isinstance(lease := await self._lease(), TaskLease):
            self.running.setdefault(lease.task.task_id, []).append(lease.rollout_id)
            self.nonces[lease.rollout_id] = lease.nonce

    async def _lease(self) -> TaskLease | EmptyReason:
        nonce = uuid.uuid4().hex
        return await self.store.runs.lease_task(self.run_id, (Purpose.TRAIN,), nonce)

    async def finish(self, *task_ids: str, **facts: Any) -> None:
        """Settle all rollouts of admitted tasks, one after the other."""
        for task_id in task_ids:
            await self.finish_slots(task_id, range(len(self.running[task_id])), **facts)

    async def finish_slots(
        self,
        task_id: str,
        slots: Sequence[int],
        version: int = 0,
        rewards: Mapping[str, Sequence[float]] = {},
    ) -> None:
        """Settle some rollouts of an admitted task; `rewards` are by slot."""
        for slot in slots:
            rollout_id = self.running[task_id][slot]
            given = tuple((name, values[slot]) for name, values in rewards.items())
            result = RolloutResult(
                rollout_id=rollout_id,
                finished=True,
                rewards=given,
                min_weight_version=version,
                sample_ids=(f"{rollout_id}#t",),
            )
            await self.store.runs.settle(self.run_id, [result])

    async def complete(self, *task_ids: str, **facts: Any) -> None:
        """Admit and finish tasks."""
        await self.admit(*task_ids)
        await self.finish(*task_ids, **facts)

    async def lead(self, trainer_id: str = "trainer", step: int = 0) -> int:
        """Take over as trainer; the epoch."""
        reconciled = await self.store.ledger.reconcile(self.run_id, step, trainer_id)
        self.epoch, self.pending = reconciled.epoch, tuple(reconciled.pending_steps)
        return self.epoch

    async def awaits(self, step: int, base: int = 0) -> int:
        """Report that the trainer waits for a step; the number of groups too old for it."""
        return await self.store.ledger.await_step(self.run_id, self.epoch, step, base)

    async def attempt(
        self,
        step: int,
        base: int = 0,
        num_groups: int = 0,
        min_groups: int = 0,
        streaming: bool = False,
    ) -> LeaseAttempt:
        """Ask for a step."""
        return await self.store.ledger.lease_samples(
            self.run_id, self.epoch, step, base, num_groups, min_groups, streaming
        )

    async def stream(self, step: int, base: int = 0, num_groups: int = 0) -> StepLease:
        """Lease what is ready of an open step; something must be."""
        attempt = await self.attempt(step, base, num_groups, streaming=True)
        assert attempt.lease is not None
        return attempt.lease

    async def lease_part(self, step: int, min_groups: int = 1) -> StepLease:
        """Lease what is ready of a step; something must be."""
        attempt = await self.attempt(step, min_groups=min_groups)
        assert attempt.lease is not None
        return attempt.lease

    async def lease(self, step: int, base: int = 0) -> StepLease:
        """Ask for a step that must be there."""
        attempt = await self.attempt(step, base)
        assert attempt.lease is not None
        return attempt.lease

    async def reject(self, step: int, messages: Mapping[str, str]) -> RejectGroupsResponse:
        """Take groups out of a step."""
        return await self.store.ledger.reject(self.run_id, self.epoch, step, messages)

    async def commit(self, step: int) -> int:
        """Commit a step; the samples covered."""
        return await self.store.ledger.commit(self.run_id, self.epoch, step)

    async def publish(self, weight_version: int) -> PublishWait:
        """What a publish waits for."""
        return await self.store.ledger.publish_wait(self.run_id, self.epoch, weight_version)


async def ledger_of(store: Store, rules: RunConfig = RULES, **changes: Any) -> Ledger:
    """A fresh run."""
    rules, run_id = replace(rules, **changes), uuid.uuid4().hex
    await store.runs.create_run(run_id, rules)
    return Ledger(store, run_id, num_samples=rules.group_size)


def names(lease: StepLease) -> list[str]:
    """The slots of a lease's fresh samples."""
    return [name.rpartition("/")[0] for name in lease.sample_ids]
