"""Leases of tasks on every store: repeated calls, agents' own tasks, and why there is none."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from services.chassis.errors import Reason
from tests.lib.trajectory_manager.support import Run, failed, other_run, refused, rewarded
from trajectory_manager.model.records import (
    MAX_REPLACEMENTS,
    EmptyReason,
    FailureClass,
    Purpose,
    Task,
    TaskLease,
)
from trajectory_manager.store.redis.connect import Store


def own_task(task_id: str = "mine", num_samples: int = 2) -> Task:
    """An agent's own task."""
    return Task(
        task_id=task_id,
        payload_json="{}",
        num_samples=num_samples,
        purpose=Purpose.TRAIN,
        own=True,
    )


async def own(run: Run, task: Task | None = None, nonce: str = "") -> TaskLease:
    """One rollout of the agent's own task; it must be there."""
    nonce = nonce or f"own-{next(run.nonces)}"
    lease = await run.store.runs.lease_own_task(run.run_id, task or own_task(), nonce)
    assert isinstance(lease, TaskLease)
    return lease


async def play(run: Run, lease: TaskLease, value: float | None = 1.0) -> None:
    """The rollout of a lease, from its start to its end; None: it fails."""
    await run.start(lease.rollout_id, lease.nonce)
    await run.turn(lease.rollout_id, "t1", [1, 2], [3])
    await run.finish(lease.rollout_id, failed() if value is None else rewarded(value))


async def test_a_repeated_call_gets_the_same_lease(run: Run) -> None:
    """The answer was lost: nothing else is leased, and the lease lives on."""
    await run.submit("a")
    first = await run.ask("nonce")
    assert isinstance(first, TaskLease)
    assert await run.ask("nonce") == first
    counts = await run.store.runs.run_counts(run.run_id)
    assert counts.num_running_rollouts == 1
    other = await run.ask("other")
    assert isinstance(other, TaskLease)
    assert other.rollout_id == "a/1/1"


async def test_a_call_repeated_after_the_end_gets_another_lease(run: Run) -> None:
    """The nonce names what is held, not what was."""
    await run.submit("a")
    first = await run.ask("nonce")
    assert isinstance(first, TaskLease)
    await play(run, first, value=None)
    again = await run.ask("nonce")
    assert isinstance(again, TaskLease)
    assert again.rollout_id == "a/0/2"
    await refused(Reason.LEASE_EXPIRED, run.start(first.rollout_id, "nonce"))
    await run.start(again.rollout_id, "nonce")


async def test_a_call_repeated_after_expiry_gets_another_lease(store: Store) -> None:
    """An expired lease is not handed out again."""
    run = await other_run(store, lease_seconds=0.05)
    await run.submit("a")
    first = await run.ask("nonce")
    assert isinstance(first, TaskLease)
    while not await run.rollouts.sweep(run.run_id):
        await asyncio.sleep(0.01)
    again = await run.ask("nonce")
    assert isinstance(again, TaskLease)
    assert again.rollout_id != first.rollout_id


async def test_each_reason_for_no_lease_is_named(store: Store) -> None:
    """Nothing queued, admission closed, the store full, the run ended."""
    run = await other_run(store, max_stored_tokens=1000)
    assert await run.ask() is EmptyReason.NOTHING_QUEUED
    await run.submit("a", "b", "c")
    while isinstance(await run.ask(), TaskLease):
        pass
    assert await run.ask() is EmptyReason.ADMISSION_CLOSED
    await run.store.runs.add_stored_tokens(run.run_id, 1001)
    assert await run.ask() is EmptyReason.ADMISSION_CLOSED, "the cap is not what keeps it out"
    other = await other_run(store, max_stored_tokens=1000)
    await other.submit("a")
    await store.runs.add_stored_tokens(other.run_id, 1001)
    assert await other.ask() is EmptyReason.STORE_FULL
    await store.runs.end_run(other.run_id)
    assert await other.ask() is EmptyReason.RUN_ENDED


async def test_an_ended_run_gives_back_what_is_held(run: Run) -> None:
    """A call repeated after the end still learns its lease; a trainer starts the run again."""
    await run.submit("a")
    lease = await run.ask("nonce")
    await run.store.runs.end_run(run.run_id)
    assert await run.ask("nonce") == lease
    assert await run.ask("other") is EmptyReason.RUN_ENDED
    assert (await run.store.runs.run(run.run_id)).end_time > 0
    await run.store.ledger.reconcile(run.run_id, 0, "trainer")
    assert (await run.store.runs.run(run.run_id)).end_time == 0
    assert isinstance(await run.ask("other"), TaskLease)


async def test_an_own_task_is_leased_by_its_name_only(run: Run) -> None:
    """It is in no queue, and its slots are not given to others."""
    first = await own(run)
    assert first.rollout_id == "mine/0/1"
    assert await run.ask() is EmptyReason.NOTHING_QUEUED
    assert (await own(run)).rollout_id == "mine/1/1"
    counts = await run.store.runs.run_counts(run.run_id)
    assert (counts.num_admitted_groups, counts.num_queued_tasks) == (1, 0)


async def test_a_queued_task_does_open_slots(run: Run) -> None:
    """Negative control: the slots of a submitted task are leased by anyone."""
    await run.submit("mine")
    assert [(await run.ask("a")), (await run.ask("b"))] != [EmptyReason.NOTHING_QUEUED] * 2


async def test_a_full_group_says_so(run: Run) -> None:
    """While its rollouts run, once it is complete, and once it has been trained."""
    leases = [await own(run), await own(run)]
    again = run.store.runs.lease_own_task(run.run_id, own_task(), "third")
    error = await refused(Reason.GROUP_FULL, again)
    assert "mine" in error.message
    for lease in leases:
        await play(run, lease)
    await refused(Reason.GROUP_FULL, run.store.runs.lease_own_task(run.run_id, own_task(), "third"))
    epoch = (await run.store.ledger.reconcile(run.run_id, 0, "trainer")).epoch
    assert (await run.store.ledger.lease_samples(run.run_id, epoch, 1, 0, 0)).lease is not None
    await run.store.ledger.commit(run.run_id, epoch, 1)
    await refused(Reason.GROUP_FULL, run.store.runs.lease_own_task(run.run_id, own_task(), "third"))


async def test_a_failed_sample_is_replaced_in_its_own_group(run: Run) -> None:
    """Only the agent's own call gets the slot again."""
    await play(run, await own(run), value=None)
    assert await run.ask() is EmptyReason.NOTHING_QUEUED
    assert (await own(run)).rollout_id == "mine/0/2"


async def test_own_tasks_wait_for_admission(run: Run) -> None:
    """A new group is admitted under the same bound as queued ones; an admitted one goes on."""
    for name in ("x", "y"):
        await own(run, own_task(name))
    answer = await run.store.runs.lease_own_task(run.run_id, own_task("z"), "n")
    assert answer is EmptyReason.ADMISSION_CLOSED
    assert (await own(run, own_task("y"))).rollout_id == "y/1/1"


async def test_an_own_lease_is_idempotent(run: Run) -> None:
    """By its nonce; without it the next slot is leased."""
    first = await own(run, nonce="nonce")
    assert await own(run, nonce="nonce") == first
    assert (await own(run, nonce="other")).rollout_id == "mine/1/1"


async def test_another_definition_is_refused(run: Run) -> None:
    """Another size, another payload, or a task that is queued."""
    await own(run)
    for other in (own_task(num_samples=3), replace(own_task(), payload_json='{"a": 1}')):
        call = run.store.runs.lease_own_task(run.run_id, other, "n")
        await refused(Reason.ALREADY_EXISTS, call)
    await refused(Reason.ALREADY_EXISTS, run.submit("mine"))
    await run.submit("queued")
    call = run.store.runs.lease_own_task(run.run_id, own_task("queued"), "n")
    await refused(Reason.ALREADY_EXISTS, call)


async def test_an_own_dead_letter_is_not_queued(run: Run) -> None:
    """Nobody else is to play it."""
    for _ in range(MAX_REPLACEMENTS + 1):
        await play(run, await own(run), value=None)
    (letter,) = await run.store.runs.dead_letters(run.run_id, 0, 10)
    assert letter.task == own_task()
    assert await run.store.runs.requeue(run.run_id, ["mine"]) == 0
    await refused(Reason.GROUP_FULL, run.store.runs.lease_own_task(run.run_id, own_task(), "n"))


@pytest.mark.parametrize("num_extra", [0, 1])
async def test_own_groups_are_trained_as_others(store: Store, num_extra: int) -> None:
    """Complete with the first num_samples, though more were started."""
    run = await other_run(store, num_extra_samples=num_extra)
    leases = [await own(run) for _ in range(2 + num_extra)]
    for lease in leases[:2]:
        await play(run, lease)
    assert (await store.runs.run_counts(run.run_id)).num_ready_groups == 1


async def test_cancelled_tasks_are_not_leased_and_their_rollouts_end(run: Run) -> None:
    """A queued, a leased and a half leased one; TRAIN tasks and complete ones are left alone."""
    store, run_id = run.store, run.run_id
    names = {"queued": 1, "leased": 1, "half": 2, "complete": 1}
    order = ("complete", "leased", "half", "queued")
    tasks = [
        Task(task_id=name, payload_json="{}", num_samples=names[name], purpose=Purpose.EVAL)
        for name in order
    ]
    await store.runs.submit(run_id, tasks, 100)
    complete, leased, half = [await lease_eval(run) for _ in range(3)]
    await play(run, complete)
    await run.start(leased.rollout_id, leased.nonce)
    await run.submit("train")
    assert await store.runs.cancel(run_id, [*order, "train", "unknown"]) == 3
    assert await store.runs.cancel(run_id, order) == 0
    held = await store.runs.extend_tasks(run_id, [(x.rollout_id, x.nonce) for x in (leased, half)])
    assert held == [False, False]
    assert await run.rollouts.sweep(run_id) == 2
    [found] = await store.tokens.read(run_id, [leased.rollout_id])
    assert found is not None
    assert found[0].outcome is not None
    assert found[0].outcome.failure_class is FailureClass.CANCELLED
    # Nothing of them is replaced; the TRAIN task is still there.
    ask = await store.runs.lease_task(run_id, (Purpose.EVAL,), "eval")
    assert ask is EmptyReason.NOTHING_QUEUED
    last = await run.store.runs.lease_task(run_id, (Purpose.EVAL, Purpose.TRAIN), "any")
    assert isinstance(last, TaskLease)
    assert last.task.task_id == "train"


async def test_tasks_that_are_not_cancelled_are_replaced(run: Run) -> None:
    """Negative control: the sweep of an EVAL rollout that failed opens its slot again."""
    task = Task(task_id="a", payload_json="{}", num_samples=1, purpose=Purpose.EVAL)
    await run.store.runs.submit(run.run_id, [task], 100)
    await play(run, await lease_eval(run), value=None)
    assert (await lease_eval(run)).rollout_id == "a/0/2"


async def lease_eval(run: Run) -> TaskLease:
    """One rollout of an EVAL task; it must be there."""
    nonce = f"eval-{next(run.nonces)}"
    lease = await run.store.runs.lease_task(run.run_id, (Purpose.EVAL,), nonce)
    assert isinstance(lease, TaskLease)
    return lease
