"""In-memory RunStore: the reference the Redis one is tested against, for tests and laptops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trajectory_manager.memory_state import GroupState, LeaseState, LedgerEntry, RunState, SlotState
from trajectory_manager.records import (
    Effect,
    LeaseAttempt,
    Purpose,
    Readiness,
    Reconciled,
    RunConfig,
    Settled,
    Settlement,
    SlotName,
    StalenessPolicy,
    StepLease,
    Submitted,
    Task,
    TaskLease,
    Topic,
)
from trajectory_manager.refusals import refusal
from trajectory_manager.store import MAX_REPLACEMENTS


class MemoryRunStore:
    """Implements `RunStore`; nothing survives the process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives Unix seconds."""
        self._clock = clock
        self._runs: dict[str, RunState] = {}

    async def create_run(self, run_id: str, config: RunConfig) -> RunConfig | None:
        """See `RunStore`."""
        existing = self._runs.get(run_id)
        if existing is None:
            self._runs[run_id] = RunState(config)
            return None
        return existing.config

    async def run_ids(self) -> list[str]:
        """See `RunStore`."""
        return list(self._runs)

    async def config(self, run_id: str) -> RunConfig:
        """See `RunStore`."""
        return self._run(run_id).config

    async def version(self, run_id: str, topic: Topic) -> int:
        """See `RunStore`."""
        return self._run(run_id).versions[topic]

    async def submit(self, run_id: str, tasks: Sequence[Task], max_queued: int) -> Submitted:
        """See `RunStore`."""
        run = self._run(run_id)
        new: dict[str, Task] = {}
        for task in tasks:
            known = run.seen.get(task.task_id) or new.get(task.task_id)
            if known is None:
                new[task.task_id] = task
            elif known != task:
                raise refusal("OTHER_TASK", task.task_id)
        purposes = {task.purpose for task in tasks} or {Purpose.TRAIN}
        free = {purpose: max_queued - len(run.queue[purpose]) for purpose in purposes}
        for purpose, left in free.items():
            wanted = sum(task.purpose == purpose for task in new.values())
            if wanted > left:
                raise refusal("FULL_QUEUE", wanted, max(0, left))
            free[purpose] = left - wanted
        run.seen |= new
        for task in new.values():
            run.queue[task.purpose].append(task)
        if new:
            run.changed(Topic.TASKS)
        return Submitted(num_accepted=len(new), num_free=min(free.values()))

    async def lease_task(
        self, run_id: str, purposes: Sequence[Purpose], nonce: str
    ) -> TaskLease | None:
        """See `RunStore`."""
        run = self._run(run_id)
        for purpose in purposes:
            found = self._open_slot(run, purpose)
            if found is not None:
                return self._lease_slot(run, *found, nonce)
        return None

    def _open_slot(self, run: RunState, purpose: Purpose) -> tuple[GroupState, int] | None:
        slots = run.open_slots[purpose]
        while slots:
            task_id, index = slots.popleft()
            if task_id in run.groups:
                return run.groups[task_id], index
        may_start = purpose is Purpose.EVAL or run.num_admissible > 0
        if not run.queue[purpose] or not may_start:
            return None
        task = run.queue[purpose].popleft()
        group = run.groups[task.task_id] = GroupState(
            task, [SlotState() for _ in range(task.num_samples)]
        )
        run.num_admitted += purpose is Purpose.TRAIN
        slots.extend((task.task_id, index) for index in range(1, task.num_samples))
        return group, 0

    def _lease_slot(self, run: RunState, group: GroupState, index: int, nonce: str) -> TaskLease:
        slot = group.slots[index]
        slot.attempt, slot.leased = slot.attempt + 1, True
        rollout_id = str(SlotName(group.task.task_id, index, slot.attempt))
        seconds = run.config.lease_seconds
        run.leases[rollout_id] = LeaseState(nonce, self._clock() + seconds)
        return TaskLease(task=group.task, rollout_id=rollout_id, nonce=nonce, seconds=seconds)

    async def extend_tasks(self, run_id: str, leases: Sequence[tuple[str, str]]) -> list[bool]:
        """See `RunStore`."""
        run = self._run(run_id)
        held = [self._held(run, rollout_id, nonce) for rollout_id, nonce in leases]
        for lease in held:
            if lease is not None:
                lease.expires = self._clock() + run.config.lease_seconds
        return [lease is not None for lease in held]

    async def enlist(self, run_id: str, rollout_id: str, nonce: str | None) -> Purpose | None:
        """See `RunStore`."""
        run = self._run(run_id)
        purpose = None
        if nonce is not None:
            name = SlotName.parse(rollout_id)
            if name is None or self._held(run, rollout_id, nonce) is None:
                raise refusal("LOST_LEASE", rollout_id)
            purpose = run.groups[name.task_id].task.purpose
        run.listed.setdefault(rollout_id)
        return purpose

    async def listed(self, run_id: str, start: int, limit: int) -> list[str]:
        """See `RunStore`."""
        return list(self._run(run_id).listed)[start : start + limit]

    async def announce(self, run_id: str, rollout_id: str) -> None:
        """See `RunStore`."""
        self._run(run_id).marks.setdefault(rollout_id)

    async def unsettled(self, run_id: str, limit: int) -> list[str]:
        """See `RunStore`."""
        return list(self._run(run_id).marks)[:limit]

    async def expired(self, run_id: str, limit: int) -> list[str]:
        """See `RunStore`."""
        leases, now = self._run(run_id).leases, self._clock()
        over = sorted((lease.expires, name) for name, lease in leases.items())
        return [name for expires, name in over if expires <= now][:limit]

    async def settle(self, run_id: str, settlement: Settlement) -> Settled:
        """See `RunStore`."""
        run = self._run(run_id)
        run.marks.pop(settlement.rollout_id, None)
        run.leases.pop(settlement.rollout_id, None)
        name = SlotName.parse(settlement.rollout_id)
        group = run.groups.get(name.task_id) if name else None
        if name is None or group is None or name.slot >= len(group.slots):
            return Settled(effect=Effect.IGNORED)
        slot = group.slots[name.slot]
        if slot.attempt != name.attempt or not slot.leased:
            return Settled(effect=Effect.IGNORED)
        slot.leased = False
        if not settlement.finished:
            return self._replace(run, group, name)
        slot.settlement = settlement
        if len(group.settlements) < len(group.slots):
            return Settled(effect=Effect.DONE)
        return self._complete(run, group)

    def _replace(self, run: RunState, group: GroupState, name: SlotName) -> Settled:
        group.num_replaced += 1
        run.num_replaced += 1
        if group.num_replaced > MAX_REPLACEMENTS:
            return self._discard(run, group, "failures")
        run.open_slots[group.task.purpose].appendleft((name.task_id, name.slot))
        run.changed(Topic.TASKS)
        return Settled(effect=Effect.REPLACED)

    def _complete(self, run: RunState, group: GroupState) -> Settled:
        if group.task.purpose is Purpose.EVAL:
            del run.groups[group.task.task_id]
            return Settled(effect=Effect.COMPLETE)
        rewards = [done.reward for done in group.settlements]
        same = len(rewards) > 1 and len(set(rewards)) == 1 and rewards[0] is not None
        if run.config.zero_variance_reward and same:
            return self._discard(run, group, "zero_variance")
        run.ready.append(group.task.task_id)
        run.changed(Topic.READY)
        return Settled(effect=Effect.COMPLETE)

    def _discard(self, run: RunState, group: GroupState, reason: str) -> Settled:
        task_id = group.task.task_id
        del run.groups[task_id]
        run.num_discarded += group.task.purpose is Purpose.TRAIN
        for index, slot in enumerate(group.slots):
            run.leases.pop(str(SlotName(task_id, index, slot.attempt)), None)
        run.changed(*Topic)
        return Settled(effect=Effect.DISCARDED, reason=reason)

    async def reconcile(self, run_id: str, step: int, trainer_id: str) -> Reconciled:
        """See `RunStore`."""
        run = self._run(run_id)
        epoch = run.trainers.get(trainer_id)
        if epoch is None:
            epoch = run.trainers[trainer_id] = max(run.epoch + 1, int(self._clock() * 1000))
        if epoch < run.epoch:
            raise refusal("STALE_TRAINER", run_id, epoch, run.epoch)
        run.epoch = epoch
        self._commit(run, step)
        if step < run.committed_step:
            for later in sorted(run.ledger, reverse=True):
                self._give_back(run, later)
        run.committed_step = step
        return Reconciled(epoch=epoch, pending_steps=tuple(sorted(run.ledger)))

    async def lease_samples(
        self, run_id: str, epoch: int, step: int, base_weight_version: int, num_groups: int
    ) -> LeaseAttempt:
        """See `RunStore`."""
        run = self._led(run_id, epoch)
        if step in run.ledger:
            return LeaseAttempt(lease=run.ledger[step].lease)
        if step != run.leased_step + 1:
            raise refusal("STEP_ORDER", step, run.leased_step + 1)
        wanted, bound = num_groups or run.config.groups_per_step, run.config.max_outstanding_groups
        if wanted > bound:
            raise refusal("TOO_MANY_GROUPS", wanted, bound)
        num_too_old, fresh = self._fresh(run, base_weight_version, wanted)
        if len(fresh) < wanted:
            return LeaseAttempt(lease=None, num_too_old=num_too_old)
        sample_ids = []
        for task_id in fresh:
            run.ready.remove(task_id)
            sample_ids += [
                name for done in run.groups[task_id].settlements for name in done.sample_ids
            ]
        lease = StepLease(
            step=step, base_weight_version=base_weight_version, sample_ids=tuple(sample_ids)
        )
        run.ledger[step] = LedgerEntry(lease, fresh)
        run.num_taken += wanted
        run.changed(Topic.TASKS)
        return LeaseAttempt(lease=lease, num_too_old=num_too_old)

    def _fresh(self, run: RunState, base: int, wanted: int) -> tuple[int, list[str]]:
        """The oldest `wanted` groups within the bound; those found beyond it leave the queue."""
        too_old, fresh = 0, list[str]()
        for task_id in list(run.ready):
            if len(fresh) == wanted:
                break
            group = run.groups[task_id]
            within = base - group.min_weight_version <= run.config.max_staleness
            if within or run.config.staleness_policy is StalenessPolicy.MASK:
                fresh.append(task_id)
                continue
            too_old += 1
            run.ready.remove(task_id)
            self._discard(run, group, run.config.staleness_policy.name.lower())
        return too_old, fresh

    async def extend_samples(self, run_id: str, epoch: int, step: int) -> float:
        """See `RunStore`."""
        run = self._led(run_id, epoch)
        if step not in run.ledger:
            raise refusal("UNKNOWN_STEP", step)
        return run.config.lease_seconds

    async def commit(self, run_id: str, epoch: int, step: int) -> int:
        """See `RunStore`."""
        run = self._led(run_id, epoch)
        if step > run.leased_step:
            raise refusal("UNKNOWN_STEP", step)
        num_samples = self._commit(run, step)
        run.committed_step = max(run.committed_step, step)
        return num_samples

    def _commit(self, run: RunState, step: int) -> int:
        covered = [run.ledger.pop(past) for past in sorted(run.ledger) if past <= step]
        for entry in covered:
            for task_id in entry.groups:
                del run.groups[task_id]
        if covered:
            run.commits[step] = sum(len(entry.lease.sample_ids) for entry in covered)
        return run.commits.get(step, 0)

    async def release(self, run_id: str, epoch: int, step: int) -> None:
        """See `RunStore`."""
        run = self._led(run_id, epoch)
        if step not in run.ledger:
            return
        if step != run.leased_step:
            raise refusal("STEP_ORDER", step, run.leased_step)
        self._give_back(run, step)

    def _give_back(self, run: RunState, step: int) -> None:
        entry = run.ledger.pop(step)
        run.ready.extendleft(reversed(entry.groups))
        run.num_taken -= len(entry.groups)
        run.changed(Topic.READY)

    async def readiness(self, run_id: str) -> Readiness:
        """See `RunStore`."""
        run = self._run(run_id)
        outstanding = run.num_admitted - run.num_discarded - run.num_taken
        return Readiness(
            num_ready_groups=len(run.ready),
            num_running_groups=outstanding - len(run.ready),
            num_admissible_groups=run.num_admissible,
            num_queued_tasks=sum(len(queue) for queue in run.queue.values()),
            num_running_rollouts=len(run.leases),
            groups_per_step=run.config.groups_per_step,
            committed_step=run.committed_step,
            leased_step=run.leased_step,
            num_admitted_groups=run.num_admitted,
            num_discarded_groups=run.num_discarded,
            num_replaced_samples=run.num_replaced,
        )

    def _run(self, run_id: str) -> RunState:
        run = self._runs.get(run_id)
        if run is None:
            raise refusal("UNKNOWN_RUN", run_id)
        return run

    def _led(self, run_id: str, epoch: int) -> RunState:
        run = self._run(run_id)
        if run.epoch != epoch:
            raise refusal("STALE_TRAINER", run_id, epoch, run.epoch)
        return run

    def _held(self, run: RunState, rollout_id: str, nonce: str) -> LeaseState | None:
        lease = run.leases.get(rollout_id)
        if lease is None or lease.nonce != nonce or lease.expires <= self._clock():
            return None
        return lease


__all__ = ["MemoryRunStore"]
