"""In-memory LedgerStore: the reference the Redis one is tested against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from seamflow.trajectory.v1 import sample_service_pb2 as pb

from tests.lib.trajectory_manager.memory import replay_draw
from tests.lib.trajectory_manager.memory.run_state import GroupState, LedgerEntry, Runs, RunState
from trajectory_manager.model.records import DeadLetterReason, SlotName, StalenessPolicy, Topic
from trajectory_manager.model.runs import (
    LeaseAttempt,
    PublishWait,
    StepLease,
)
from trajectory_manager.store.errors import store_error
from trajectory_manager.store.redis.ledger_store import LedgerStore


class MemoryLedgerStore(LedgerStore):
    """Implements `LedgerStore`; nothing survives the process."""

    def __init__(self, runs: Runs, clock: Callable[[], float]) -> None:
        """`clock` gives Unix seconds."""
        self._runs = runs
        self._clock = clock

    async def reconcile(self, run_id: str, step: int, trainer_id: str) -> pb.ReconcileResponse:
        """See `LedgerStore`."""
        run = self._runs.get(run_id)
        epoch = run.trainers.get(trainer_id)
        is_new = epoch is None
        if epoch is None:
            epoch = run.trainers[trainer_id] = max(run.epoch + 1, int(self._clock() * 1000))
        if epoch < run.epoch:
            raise store_error("STALE_TRAINER", run_id, epoch, run.epoch)
        run.epoch, run.training = epoch, run.training and not is_new
        if run.end_time:
            run.end_time = 0.0
            run.changed(Topic.TASKS)
        self._cover(run, step)
        restored, run.committed_step = step < run.committed_step, step
        if restored:
            self._give_back(run, after=step)
        elif is_new:
            self._dead_letter_poison_step(run)
        run.changed(Topic.READY)
        pending = tuple(sorted(run.ledger))
        is_open = bool(pending) and run.ledger[pending[-1]].lease.is_open
        return pb.ReconcileResponse(
            epoch=epoch, pending_steps=pending, open_step=pending[-1] if is_open else 0
        )

    def _dead_letter_poison_step(self, run: RunState) -> None:
        """The step at which a trainer ended last dies if that was often, later ones return."""
        limit = run.config.max_deliveries
        step = max(run.ledger, key=lambda each: (run.ledger[each].epoch, each), default=0)
        if step and 0 < limit <= run.ledger[step].lease.num_deliveries:
            self._give_back(run, after=step)
            self._dead_letter_step(run, run.ledger.pop(step))

    def _dead_letter_step(self, run: RunState, entry: LedgerEntry) -> None:
        step, times = entry.lease.step, entry.lease.num_deliveries
        message = f"step {step} was delivered {times} times and never committed"
        run.num_taken -= _num_taken(entry)
        for task_id in entry.groups:
            group = run.groups[task_id]
            run.discard(group, DeadLetterReason.DELIVERIES, message, self._clock())

    async def lease_samples(
        self,
        run_id: str,
        epoch: int,
        step: int,
        base_weight_version: int,
        num_groups: int,
        min_groups: int = 0,
        streaming: bool = False,
    ) -> LeaseAttempt:
        """See `LedgerStore`."""
        run = self._led(run_id, epoch)
        entry = run.ledger.get(step)
        if entry is None:
            entry = self._begun(run, step, base_weight_version)
        else:
            self._deliver_again(entry, epoch)
        if not entry.lease.is_open:
            return LeaseAttempt(lease=entry.lease)
        wanted = _wanted(run, num_groups, min_groups)
        num_too_old, fresh = self._fresh(run, entry.lease, wanted - len(entry.groups))
        number = len(entry.groups) + len(fresh)
        whole = number >= (min_groups or wanted)
        if whole or (streaming and fresh):
            run.ledger[step] = entry
            self._grow(run, entry, fresh)
        if whole:
            self._complete(run, run_id, entry, streaming)
        else:
            run.awaits(entry.lease.base_weight_version)
        lease = entry.lease if step in run.ledger else None
        return LeaseAttempt(lease=lease, num_too_old=num_too_old)

    async def await_step(self, run_id: str, epoch: int, step: int, base_weight_version: int) -> int:
        """See `LedgerStore`."""
        run = self._led(run_id, epoch)
        if step <= run.leased_step:
            return 0
        run.reporting_epoch = epoch
        run.awaits(base_weight_version)
        stale = [
            run.groups[task_id]
            for task_id in run.ready
            if _is_too_old(run, run.groups[task_id], base_weight_version)
        ]
        for group in stale:
            self._dead_letter_stale(run, group, step, base_weight_version)
        return len(stale)

    def _begun(self, run: RunState, step: int, base: int) -> LedgerEntry:
        """An entry that takes part in nothing yet."""
        last = run.ledger.get(run.leased_step)
        if last is not None and last.lease.is_open:
            raise store_error("OPEN_STEP", step, run.leased_step)
        if step != run.leased_step + 1:
            raise store_error("STEP_ORDER", step, run.leased_step + 1)
        lease = StepLease(
            step=step,
            base_weight_version=base,
            sample_ids=(),
            is_open=True,
        )
        return LedgerEntry(lease, [], run.epoch)

    def _deliver_again(self, entry: LedgerEntry, epoch: int) -> None:
        lease = entry.lease
        if entry.epoch != epoch:
            entry.epoch = epoch
            entry.lease = replace(lease, num_deliveries=lease.num_deliveries + 1)

    def _grow(self, run: RunState, entry: LedgerEntry, fresh: list[str]) -> None:
        for task_id in fresh:
            run.ready.remove(task_id)
            run.order.pop(task_id, None)
        groups = [_samples(run.groups[task_id]) for task_id in fresh]
        entry.groups += fresh
        entry.lease = replace(
            entry.lease,
            sample_ids=(*entry.lease.sample_ids, *chain.from_iterable(groups)),
        )

    def _complete(self, run: RunState, run_id: str, entry: LedgerEntry, streaming: bool) -> None:
        rules, drawn = run.config.replay, list[str]()
        if rules is not None:
            replay_draw.trim(run.replay, rules.capacity_groups)
            drawn = replay_draw.draw(run.replay, rules, run_id, entry.lease.step, set(entry.groups))
        again = [run.replay[task_id] for task_id in drawn]
        entry.lease = replace(
            entry.lease,
            replayed_ids=tuple(chain.from_iterable(group.samples for group in again)),
            is_open=False,
            streamed=streaming,
        )
        run.num_taken += len(entry.groups)
        if run.reporting_epoch == run.epoch:
            run.training, run.next_base = True, entry.lease.base_weight_version + 1
        run.changed(Topic.TASKS)

    def _fresh(self, run: RunState, lease: StepLease, wanted: int) -> tuple[int, list[str]]:
        """The first `wanted` groups within the staleness bound; older ones become dead letters."""
        step, base = lease.step, lease.base_weight_version
        too_old, fresh = 0, list[str]()
        while len(fresh) < wanted:
            task_id = next((name for name in run.leasable() if name not in fresh), None)
            if task_id is None:
                break
            group = run.groups[task_id]
            if not _is_too_old(run, group, base):
                fresh.append(task_id)
                continue
            too_old += 1
            self._dead_letter_stale(run, group, step, base)
        return too_old, fresh

    def _dead_letter_stale(self, run: RunState, group: GroupState, step: int, base: int) -> None:
        withholds = run.config.staleness_policy is StalenessPolicy.WITHHOLD
        reason = DeadLetterReason.WITHHELD if withholds else DeadLetterReason.DROPPED
        message = (
            f"{base - group.min_weight_version} versions old for step {step}: "
            f"its oldest token has {group.min_weight_version}, the step begins with {base}"
        )
        run.ready.remove(group.task.task_id)
        run.discard(group, reason, message, self._clock())
        if withholds:
            _keep(run, group, step)

    async def reject(
        self, run_id: str, epoch: int, step: int, messages: Mapping[str, str]
    ) -> pb.RejectGroupsResponse:
        """See `LedgerStore`."""
        run = self._led(run_id, epoch)
        if step not in run.ledger:
            raise store_error("UNKNOWN_STEP", step)
        entry = run.ledger[step]
        num_replayed = _reject_replayed(run, entry, messages)
        fresh = [task_id for task_id in entry.groups if task_id in messages]
        if fresh:
            self._give_back(run, after=step)
            self._reject_fresh(run, entry, {task_id: messages[task_id] for task_id in fresh})
        return pb.RejectGroupsResponse(
            num_rejected=len(fresh) + num_replayed, open=entry.lease.is_open
        )

    def _reject_fresh(self, run: RunState, entry: LedgerEntry, messages: Mapping[str, str]) -> None:
        run.num_taken -= _num_taken(entry)
        for task_id, message in messages.items():
            entry.groups.remove(task_id)
            run.discard(run.groups[task_id], DeadLetterReason.REJECTED, message, self._clock())
        entry.lease = replace(
            entry.lease,
            sample_ids=_without(entry.lease.sample_ids, messages),
            replayed_ids=(),
            num_deliveries=1,
            is_open=True,
            streamed=False,
        )
        run.awaits(entry.lease.base_weight_version)

    async def extend_samples(self, run_id: str, epoch: int, step: int) -> float:
        """See `LedgerStore`."""
        run = self._led(run_id, epoch)
        if step not in run.ledger:
            raise store_error("UNKNOWN_STEP", step)
        return run.config.lease_seconds

    async def commit(self, run_id: str, epoch: int, step: int) -> int:
        """See `LedgerStore`."""
        run = self._led(run_id, epoch)
        if step > run.leased_step:
            raise store_error("UNKNOWN_STEP", step)
        if step in run.ledger and run.ledger[step].lease.is_open:
            raise store_error("OPEN_STEP", step, step)
        num_samples = self._cover(run, step)
        run.committed_step = max(run.committed_step, step)
        return num_samples

    def _cover(self, run: RunState, step: int) -> int:
        covered = [run.ledger.pop(past) for past in sorted(run.ledger) if past <= step]
        for entry in covered:
            # Lost that it was completed, but a checkpoint covers it.
            run.num_taken += len(entry.groups) * entry.lease.is_open
            for task_id in entry.groups:
                _committed(run, run.groups.pop(task_id), entry.lease.step)
        if covered:
            run.commits[step] = sum(len(entry.lease.sample_ids) for entry in covered)
        return run.commits.get(step, 0)

    def _give_back(self, run: RunState, after: int) -> None:
        """Groups of later steps return to the head of the queue, in order."""
        for step in sorted(run.ledger, reverse=True):
            if step <= after:
                return
            entry = run.ledger.pop(step)
            groups = entry.groups
            run.ready.extendleft(reversed(groups))
            run.order |= {task_id: run.groups[task_id].admission for task_id in groups}
            run.num_taken -= _num_taken(entry)
            run.changed(Topic.READY)

    async def publish_wait(self, run_id: str, epoch: int, weight_version: int) -> PublishWait:
        """See `LedgerStore`."""
        run = self._led(run_id, epoch)
        if run.config.staleness_policy is not StalenessPolicy.WAIT:
            return PublishWait(seconds=0.0)
        if run.publish[0] != weight_version:
            run.publish = (weight_version, self._clock())
        seconds = run.publish[1] + run.config.publish_wait_seconds - self._clock()
        oldest = weight_version - run.config.max_staleness
        blocking, running = 0, list[str]()
        for task_id in sorted(run.order, key=lambda task_id: run.order[task_id]):
            group = run.groups[task_id]
            sampled = any(done.sample_ids for done in group.results)
            if sampled and group.min_weight_version < oldest:
                blocking += 1
                continue
            running += [
                str(SlotName(task_id, index, slot.attempt))
                for index, slot in enumerate(group.slots)
                if slot.leased
            ]
        return PublishWait(
            seconds=max(0.0, seconds), num_blocking_groups=blocking, running=tuple(running)
        )

    async def committed_steps(self, run_id: str, rollout_ids: Sequence[str]) -> list[int]:
        """See `LedgerStore`."""
        run = self._runs.get(run_id)
        return [_committed_step(run, SlotName.parse(rollout_id)) for rollout_id in rollout_ids]

    def _led(self, run_id: str, epoch: int) -> RunState:
        run = self._runs.get(run_id)
        if run.epoch != epoch:
            raise store_error("STALE_TRAINER", run_id, epoch, run.epoch)
        return run


def _wanted(run: RunState, num_groups: int, min_groups: int) -> int:
    """How many groups make the step whole."""
    wanted, bound = num_groups or run.config.groups_per_step, run.config.max_leased_groups
    if wanted > bound:
        raise store_error("TOO_MANY_GROUPS", wanted, bound)
    if min_groups > wanted:
        raise store_error("MINIMUM_ABOVE", min_groups, wanted)
    return wanted


def _num_taken(entry: LedgerEntry) -> int:
    """Groups that admission counts as taken: those of an open step wait still."""
    return 0 if entry.lease.is_open else len(entry.groups)


def _reject_replayed(run: RunState, entry: LedgerEntry, messages: Mapping[str, str]) -> int:
    """Take replayed groups out of the entry and the replay buffer; how many were in that."""
    left = _without(entry.lease.replayed_ids, messages)
    if left == entry.lease.replayed_ids:
        return 0
    entry.lease = replace(entry.lease, replayed_ids=left)
    return sum(run.replay.pop(task_id, None) is not None for task_id in messages)


def _without(sample_ids: Sequence[str], messages: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for name in sample_ids if name.rsplit("/", 2)[0] not in messages)


def _is_too_old(run: RunState, group: GroupState, base: int) -> bool:
    masks = run.config.staleness_policy is StalenessPolicy.MASK
    return not masks and base - group.min_weight_version > run.config.max_staleness


def _committed(run: RunState, group: GroupState, step: int) -> None:
    """Remember which rollouts were made for the group and which of them were trained."""
    task_id, slots = group.task.task_id, group.slots
    run.trained.setdefault(step, []).append((task_id, *(slot.attempt for slot in slots)))
    counted = tuple(slot.attempt if slot.result else 0 for slot in slots)
    run.steps[task_id] = (step, counted)
    _keep(run, group, step)


def _committed_step(run: RunState, name: SlotName | None) -> int:
    step, counted = run.steps.get(name.task_id, (0, ())) if name else (0, ())
    trained = name is not None and name.attempt in counted[name.slot : name.slot + 1]
    return step if trained else 0


def _keep(run: RunState, group: GroupState, step: int) -> None:
    """Keep the group for replay, if the run replays."""
    rules = run.config.replay
    if rules is None:
        return
    rewards = [dict(done.rewards).get(rules.reward_name) for done in group.results]
    given = [reward for reward in rewards if reward is not None]
    run.replay[group.task.task_id] = replay_draw.ReplayGroup(
        samples=_samples(group),
        reward=sum(given) / len(given) if given else None,
        step=step,
    )


def _samples(group: GroupState) -> tuple[str, ...]:
    """The samples of a complete group."""
    return tuple(name for done in group.results for name in done.sample_ids)
