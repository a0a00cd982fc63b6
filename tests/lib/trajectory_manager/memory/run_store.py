"""In-memory RunStore: the reference the Redis one is tested against."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from seamflow.trajectory.v1.sample_service_pb2 import Readiness
from seamflow.trajectory.v1.task_service_pb2 import SubmitTasksResponse

from tests.lib.trajectory_manager.memory import task_leases
from tests.lib.trajectory_manager.memory.column_store import MemoryColumnStore
from tests.lib.trajectory_manager.memory.run_state import (
    GroupState,
    LeaseState,
    Runs,
    RunState,
    SlotState,
)
from tests.lib.trajectory_manager.memory.token_store import MemoryTokenStore
from trajectory_manager.model.records import (
    DeadLetter,
    DeadLetterReason,
    Effect,
    EmptyReason,
    LostLease,
    Purpose,
    RolloutResult,
    SettleResult,
    SlotName,
    Task,
    TaskContext,
    TaskLease,
    Topic,
)
from trajectory_manager.model.runs import Run, RunConfig
from trajectory_manager.store.errors import store_error
from trajectory_manager.store.redis.run_store import RunStore


class MemoryRunStore(RunStore):
    """Implements `RunStore`; nothing survives the process."""

    def __init__(
        self,
        runs: Runs,
        tokens: MemoryTokenStore,
        columns: MemoryColumnStore,
        clock: Callable[[], float],
    ) -> None:
        """`clock` gives Unix seconds."""
        self._clock = clock
        self._runs = runs
        self._tokens = tokens
        self._columns = columns

    async def create_run(self, run_id: str, config: RunConfig) -> RunConfig | None:
        """See `RunStore`."""
        if run_id in self._runs.by_id:
            return self._runs.by_id[run_id].config
        self._runs.by_id[run_id] = RunState(config, create_time=self._clock())
        return None

    async def run(self, run_id: str) -> Run:
        """See `RunStore`."""
        run = self._runs.get(run_id)
        return Run(
            run_id=run_id,
            config=run.config,
            create_time=run.create_time,
            end_time=run.end_time,
            committed_step=run.committed_step,
        )

    async def end_run(self, run_id: str) -> None:
        """See `RunStore`."""
        run = self._runs.get(run_id)
        run.end_time = run.end_time or self._clock()
        run.changed(Topic.TASKS)

    async def delete_run(self, run_id: str) -> int:
        """See `RunStore`."""
        if not self._runs.get(run_id).end_time:
            raise store_error("RUNNING_RUN", run_id)
        del self._runs.by_id[run_id]
        self._columns.forget_run(run_id)
        return self._tokens.delete_run(run_id)

    async def run_ids(self) -> list[str]:
        """See `RunStore`."""
        return list(self._runs.by_id)

    async def config(self, run_id: str) -> RunConfig:
        """See `RunStore`."""
        return self._runs.get(run_id).config

    async def version(self, run_id: str, topic: Topic) -> int:
        """See `RunStore`."""
        return self._runs.get(run_id).versions[topic]

    async def submit(
        self, run_id: str, tasks: Sequence[Task], max_queued: int
    ) -> SubmitTasksResponse:
        """See `RunStore`."""
        run = self._runs.get(run_id)
        new: dict[str, Task] = {}
        for task in tasks:
            known = run.seen.get(task.task_id) or new.get(task.task_id)
            if known is None:
                new[task.task_id] = task
            elif known != task:
                raise store_error("OTHER_TASK", task.task_id)
        purposes = {task.purpose for task in tasks} or {Purpose.TRAIN}
        free = {purpose: max_queued - len(run.queue[purpose]) for purpose in purposes}
        for purpose, left in free.items():
            wanted = sum(task.purpose == purpose for task in new.values())
            if wanted > left:
                raise store_error("FULL_QUEUE", wanted, max(0, left))
            free[purpose] = left - wanted
        run.seen |= new
        for task in new.values():
            run.queue[task.purpose].append(task)
        if new:
            run.changed(Topic.TASKS)
        return SubmitTasksResponse(num_accepted=len(new), num_free=min(free.values()))

    async def lease_task(
        self, run_id: str, purposes: Sequence[Purpose], nonce: str
    ) -> TaskLease | EmptyReason:
        """See `RunStore`."""
        run = self._runs.get(run_id)
        if held := task_leases.repeated(run, nonce, self._clock()):
            return held
        if run.end_time:
            return EmptyReason.RUN_ENDED
        for purpose in purposes:
            found = self._open_slot(run, purpose)
            if found is not None:
                return self._lease_slot(run, *found, nonce)
        if Purpose.TRAIN in purposes and run.queue[Purpose.TRAIN]:
            return task_leases.closed_by(run)
        return EmptyReason.NOTHING_QUEUED

    async def lease_own_task(self, run_id: str, task: Task, nonce: str) -> TaskLease | EmptyReason:
        """See `RunStore`."""
        run = self._runs.get(run_id)
        if held := task_leases.repeated(run, nonce, self._clock()):
            return held
        known = run.seen.get(task.task_id)
        if known is not None and known != task:
            raise store_error("OTHER_TASK", task.task_id)
        if run.end_time:
            return EmptyReason.RUN_ENDED
        if known is None:
            if run.num_admissible == 0:
                return task_leases.closed_by(run)
            run.seen[task.task_id] = task
            return self._lease_slot(run, self._admit(run, task), 0, nonce)
        group = run.groups.get(task.task_id)
        if group is None:
            raise store_error("FULL_GROUP", task.task_id, "it is trained, or was discarded")
        for index in range(len(group.slots)):
            if group.is_open(index):
                return self._lease_slot(run, group, index, nonce)
        why = "all its rollouts are leased or finished"
        raise store_error("FULL_GROUP", task.task_id, why)

    def _open_slot(self, run: RunState, purpose: Purpose) -> tuple[GroupState, int] | None:
        slots = run.open_slots[purpose]
        while slots:
            task_id, index = slots.popleft()
            # The group may have ended or completed since the slot was opened.
            if task_id in run.groups and run.groups[task_id].is_open(index):
                return run.groups[task_id], index
        may_start = purpose is Purpose.EVAL or run.num_admissible > 0
        if not run.queue[purpose] or not may_start:
            return None
        task = run.queue[purpose].popleft()
        return self._admit(run, task), 0

    def _admit(self, run: RunState, task: Task) -> GroupState:
        train = task.purpose is Purpose.TRAIN
        earlier = run.earlier_attempts.pop(task.task_id, ())
        number = task.num_samples + run.config.num_extra_samples * train
        slots = [SlotState(attempt) for attempt in (*earlier, *[0] * number)[:number]]
        wanted = run.required_weight_version if train else 0
        run.num_admitted += train
        group = GroupState(task, slots, admission=run.num_admitted, required_weight_version=wanted)
        run.groups[task.task_id] = group
        if train:
            run.order[task.task_id] = group.admission
        if not task.own:
            run.open_slots[task.purpose].extend((task.task_id, i) for i in range(1, number))
        return group

    def _lease_slot(self, run: RunState, group: GroupState, index: int, nonce: str) -> TaskLease:
        slot = group.slots[index]
        slot.attempt, slot.leased = slot.attempt + 1, True
        rollout_id = str(SlotName(group.task.task_id, index, slot.attempt))
        seconds = run.config.lease_seconds
        run.leases[rollout_id] = LeaseState(nonce, self._clock() + seconds)
        return TaskLease(task=group.task, rollout_id=rollout_id, nonce=nonce, seconds=seconds)

    async def admit_recorded(self, run_id: str, tasks: Sequence[Task]) -> SubmitTasksResponse:
        """See `RunStore`."""
        run = self._runs.get(run_id)
        for task in tasks:
            if run.seen.get(task.task_id, task) != task:
                raise store_error("OTHER_TASK", task.task_id)
        new = [task for task in tasks if task.task_id not in run.seen]
        free = run.num_admissible
        if len(new) > free and run.over_cap:
            raise store_error(
                "FULL_RUN", run_id, run.num_stored_tokens, run.config.max_stored_tokens
            )
        if len(new) > free:
            raise store_error("CLOSED_ADMISSION", len(new), max(0, free))
        for task in new:
            run.seen[task.task_id] = task
            self._admit_recorded(run, task)
        return SubmitTasksResponse(num_accepted=len(new), num_free=free - len(new))

    def _admit_recorded(self, run: RunState, task: Task) -> None:
        run.num_admitted += 1
        slots = [SlotState(attempt=1, leased=True) for _ in range(task.num_samples)]
        run.groups[task.task_id] = GroupState(task, slots, admission=run.num_admitted)
        run.order[task.task_id] = run.num_admitted
        for index in range(task.num_samples):
            rollout_id = str(SlotName(task.task_id, index, 1))
            run.leases[rollout_id] = LeaseState(None, self._clock() + run.config.lease_seconds)
            run.listed.setdefault(rollout_id)

    async def extend_tasks(self, run_id: str, leases: Sequence[tuple[str, str]]) -> list[bool]:
        """See `RunStore`."""
        run = self._runs.get(run_id)
        now = self._clock()
        held = [task_leases.held(run, rollout_id, nonce, now) for rollout_id, nonce in leases]
        for lease in held:
            if lease is not None:
                lease.expires = self._clock() + run.config.lease_seconds
        return [lease is not None for lease in held]

    async def register_rollout(
        self, run_id: str, rollout_id: str, nonce: str | None
    ) -> TaskContext | None:
        """See `RunStore`."""
        run = self._runs.get(run_id)
        leased = None
        if nonce is not None:
            name = SlotName.parse(rollout_id)
            if name is None or task_leases.held(run, rollout_id, nonce, self._clock()) is None:
                raise store_error("LOST_LEASE", rollout_id)
            group = run.groups[name.task_id]
            leased = TaskContext(group.task.purpose, group.required_weight_version)
        run.listed.setdefault(rollout_id)
        return leased

    async def listed(self, run_id: str, start: int, limit: int) -> list[str]:
        """See `RunStore`."""
        return list(self._runs.get(run_id).listed)[start : start + limit]

    async def add_outbox_marks(self, run_id: str, rollout_ids: Sequence[str]) -> None:
        """See `RunStore`."""
        marks = self._runs.get(run_id).marks
        for rollout_id in rollout_ids:
            marks.setdefault(rollout_id)

    async def remove_outbox_marks(self, run_id: str, rollout_ids: Sequence[str]) -> None:
        """See `RunStore`."""
        marks = self._runs.get(run_id).marks
        for rollout_id in rollout_ids:
            marks.pop(rollout_id, None)

    async def unsettled(self, run_id: str, limit: int) -> list[str]:
        """See `RunStore`."""
        return list(self._runs.get(run_id).marks)[:limit]

    async def expired(self, run_id: str, limit: int) -> list[LostLease]:
        """See `RunStore`."""
        run, now = self._runs.get(run_id), self._clock()
        leases, renewed = run.leases, now + run.config.lease_seconds
        over = sorted(
            (0.0 if lease.surplus else lease.expires, name)
            for name, lease in leases.items()
            if lease.surplus or lease.expires <= now
        )
        lost = [
            LostLease(
                rollout_id=name,
                surplus=leases[name].surplus,
                idle_seconds=renewed - expires,
                run_ended=run.end_time > 0,
            )
            for expires, name in over
        ]
        return lost[:limit]

    async def settle(self, run_id: str, results: Sequence[RolloutResult]) -> list[SettleResult]:
        """See `RunStore`."""
        run = self._runs.get(run_id)
        return [self._settle(run, result) for result in results]

    def _settle(self, run: RunState, result: RolloutResult) -> SettleResult:
        if result.summary is not None:
            run.keep_row(result.rollout_id, result.summary)
        run.marks.pop(result.rollout_id, None)
        run.leases.pop(result.rollout_id, None)
        name = SlotName.parse(result.rollout_id)
        group = run.groups.get(name.task_id) if name else None
        if name is None or group is None or name.slot >= len(group.slots):
            return SettleResult(effect=Effect.IGNORED)
        slot = group.slots[name.slot]
        if slot.attempt != name.attempt or not slot.leased:
            return SettleResult(effect=Effect.IGNORED)
        slot.leased = False
        if not result.finished:
            return run.replace(group, name, result, self._clock())
        slot.result = result
        run.queue_cells(group)
        if not group.complete:
            return SettleResult(effect=Effect.DONE)
        run.end_leases(group)
        return self._complete(run, group)

    def _complete(self, run: RunState, group: GroupState) -> SettleResult:
        if group.task.purpose is Purpose.EVAL:
            del run.groups[group.task.task_id]
            return SettleResult(effect=Effect.COMPLETE)
        rewards = [done.reward for done in group.results]
        if run.config.zero_variance_reward and _are_equal(rewards):
            message = f"all rewards are {(rewards[0] or 0.0) + 0.0!r}"
            return self._discard(run, group, DeadLetterReason.ZERO_VARIANCE, message)
        if run.waits_for_columns(group):
            return SettleResult(effect=Effect.COMPLETE)
        run.ready.append(group.task.task_id)
        run.changed(Topic.READY)
        return SettleResult(effect=Effect.COMPLETE)

    def _discard(
        self, run: RunState, group: GroupState, reason: DeadLetterReason, message: str
    ) -> SettleResult:
        run.discard(group, reason, message, self._clock())
        return SettleResult(effect=Effect.DISCARDED, reason=reason.name.lower())

    async def dead_letters(
        self, run_id: str, start: int, limit: int, *, newest_first: bool = False
    ) -> list[DeadLetter]:
        """See `RunStore`."""
        letters = list(self._runs.get(run_id).dead)
        return letters[:: -1 if newest_first else 1][start : start + limit]

    async def task(self, run_id: str, task_id: str) -> Task | None:
        """See `RunStore`."""
        return self._runs.get(run_id).seen.get(task_id)

    async def requeue(self, run_id: str, task_ids: Sequence[str]) -> int:
        """See `RunStore`."""
        run, wanted = self._runs.get(run_id), set(task_ids)
        again = [x for x in run.dead if x.task.task_id in wanted and not x.task.own]
        for letter in again:
            run.dead.remove(letter)
            record = (letter.task.task_id, *letter.attempts)
            for records in run.trained.values():
                # The record of the next life covers this one.
                records[:] = [known for known in records if known != record]
            run.earlier_attempts[letter.task.task_id] = letter.attempts
            run.queue[letter.task.purpose].append(letter.task)
        if again:
            run.changed(Topic.TASKS)
        return len(again)

    async def cancel(self, run_id: str, task_ids: Sequence[str]) -> int:
        """See `RunStore`."""
        run = self._runs.get(run_id)
        queued = [task for task in run.queue[Purpose.EVAL] if task.task_id in task_ids]
        groups = [group for name, group in run.groups.items() if name in task_ids]
        for task in queued:
            run.queue[Purpose.EVAL].remove(task)
        for group in (ended := [x for x in groups if x.task.purpose is Purpose.EVAL]):
            run.end_leases(group)
            del run.groups[group.task.task_id]
        return len(queued) + len(ended)

    async def add_stored_tokens(self, run_id: str, delta: int) -> None:
        """See `RunStore`."""
        run = self._runs.get(run_id)
        run.num_stored_tokens = max(0, run.num_stored_tokens + delta)
        if delta < 0:
            run.changed(Topic.TASKS)

    async def run_counts(self, run_id: str) -> Readiness:
        """See `RunStore`."""
        run = self._runs.get(run_id)
        return Readiness(
            num_ready_groups=len(run.ready),
            num_running_groups=run.num_running_groups,
            num_admissible_groups=run.num_admissible,
            num_queued_tasks=sum(len(queue) for queue in run.queue.values()),
            num_running_rollouts=sum(not lease.surplus for lease in run.leases.values()),
            groups_per_step=run.config.groups_per_step,
            committed_step=run.committed_step,
            leased_step=run.leased_step,
            num_admitted_groups=run.num_admitted,
            num_discarded_groups=run.num_discarded,
            num_replaced_samples=run.num_replaced,
            num_incomplete_groups=run.num_incomplete,
            num_replay_groups=len(run.replay),
            num_dead_letters=len(run.dead),
            num_stored_tokens=run.num_stored_tokens,
            num_kept_back_groups=len(run.ready) - len(run.leasable()),
            num_open_groups=run.num_streamed,
            num_column_failures=run.num_column_failures,
            column_failure="; ".join(
                run.column_failures[name]
                for name in run.config.required_columns
                if name in run.column_failures
            ),
        )


def _are_equal(rewards: Sequence[float | None]) -> bool:
    """Whether several rewards differ by rounding alone."""
    known = [reward for reward in rewards if reward is not None]
    if len(known) < max(len(rewards), 2):
        return False
    return math.isclose(min(known), max(known), rel_tol=1e-6, abs_tol=1e-9)
