"""The ledger suite: every promise of `LedgerStore`, on all implementations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.chassis.errors import Reason
from tests.integration.trajectory_manager.ledger import WIDE, Ledger, ledger_of, names
from tests.lib.trajectory_manager.support import RULES, Run, refused
from trajectory_manager.model.records import DeadLetterReason, StalenessPolicy
from trajectory_manager.store.redis.connect import Store


async def test_steps_are_leased_in_order_and_again_unchanged(store: Store) -> None:
    """A repeated step gets the same samples, also under a new trainer, which fences the old."""
    ledger = await ledger_of(store)
    await ledger.complete("a", "b")
    old = await ledger.lead()
    await refused(Reason.STEP_OUT_OF_ORDER, ledger.attempt(2))
    first = await ledger.lease(1)
    assert names(first) == ["a/0", "a/1"]
    assert (await ledger.attempt(1, base=5)).lease == first
    second = await ledger.lease(2)
    new = await ledger.lead("new")
    for epoch, step in ((old, 1), (new - 1, 2)):
        ledger.epoch = epoch
        await refused(Reason.STALE_EPOCH, ledger.attempt(step))
        await refused(Reason.STALE_EPOCH, ledger.commit(step))
        await refused(Reason.STALE_EPOCH, ledger.publish(step))
        await refused(Reason.STALE_EPOCH, store.ledger.extend_samples(ledger.run_id, epoch, step))
    await refused(Reason.STALE_EPOCH, ledger.lead("trainer"))
    assert await ledger.lead("new") == new
    assert await ledger.lease(1) == replace(first, num_deliveries=2)
    assert await ledger.lease(2) == replace(second, num_deliveries=2)
    assert await ledger.commit(1) == 2
    assert await ledger.commit(1) == 2
    await ledger.lead("newer", step=1)
    assert ledger.pending == (2,)


async def test_reconcile_commits_what_the_checkpoint_covers(store: Store) -> None:
    """Entries up to its step are consumed, even if CommitStep was never heard."""
    ledger = await ledger_of(store)
    await ledger.complete("a", "b")
    await ledger.lead()
    await ledger.lease(1)
    await ledger.lead("two", step=1)
    assert not ledger.pending
    counts = await store.runs.run_counts(ledger.run_id)
    assert (counts.committed_step, counts.leased_step, counts.num_ready_groups) == (1, 1, 1)


async def test_a_restore_gives_uncommitted_groups_back(store: Store) -> None:
    """After going back to an earlier step admission lets work in, and nothing is trained twice."""
    ledger = await ledger_of(store)
    await ledger.complete("a", "b")
    await ledger.lead()
    await ledger.lease(1)
    await ledger.commit(1)
    second = await ledger.lease(2)
    await ledger.lead("two", step=0)
    assert not ledger.pending
    again = await ledger.lease(1)
    assert again.sample_ids == second.sample_ids
    await ledger.complete("c")
    assert names(await ledger.lease(2)) == ["c/0", "c/1"]


async def test_a_step_lease_is_extended(store: Store) -> None:
    """While its entry is in the ledger; no step takes more groups than may wait."""
    ledger = await ledger_of(store, replace(WIDE, groups_per_step=1))
    await ledger.complete("a", "b", "c")
    await ledger.lead()
    await ledger.lease(1)
    await ledger.lease(2)
    extended = store.ledger.extend_samples
    assert await extended(ledger.run_id, ledger.epoch, 2) == RULES.lease_seconds
    await refused(Reason.NOT_FOUND, extended(ledger.run_id, ledger.epoch, 3))
    await refused(Reason.INVALID_FIELD, ledger.attempt(3, num_groups=11))


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (StalenessPolicy.DROP, DeadLetterReason.DROPPED),
        (StalenessPolicy.WAIT, DeadLetterReason.DROPPED),
        (StalenessPolicy.WITHHOLD, DeadLetterReason.WITHHELD),
    ],
)
async def test_a_group_beyond_the_bound_is_a_dead_letter(
    store: Store, policy: StalenessPolicy, reason: DeadLetterReason
) -> None:
    """It leaves the queue when a step that is too new asks, and its capacity returns."""
    ledger = await ledger_of(store, staleness_policy=policy)
    await ledger.complete("a", "b")
    await ledger.lead()
    attempt = await ledger.attempt(1, base=2)
    assert (attempt.lease, attempt.num_too_old) == (None, 2)
    counts = await store.runs.run_counts(ledger.run_id)
    assert (counts.num_discarded_groups, counts.num_admissible_groups) == (2, 2)
    letters = await store.runs.dead_letters(ledger.run_id, 0, 9)
    assert [(letter.task.task_id, letter.reason) for letter in letters] == [
        ("a", reason),
        ("b", reason),
    ]
    assert letters[0].message == (
        "2 versions old for step 1: its oldest token has 0, the step begins with 2"
    )
    assert letters[0].rollout_ids == ["a/0/1", "a/1/1"]
    await ledger.complete("c", version=1)
    assert names(await ledger.lease(1, base=2)) == ["c/0", "c/1"]


async def test_a_group_too_old_for_the_awaited_step_leaves_before_it_is_leased(
    store: Store,
) -> None:
    """Its capacity returns while the trainer waits; others stay, and so does a leased step."""
    ledger = await ledger_of(store)
    await ledger.complete("a")
    await ledger.complete("b", version=1)
    await ledger.lead()
    assert await ledger.awaits(1, base=1) == 0
    assert await ledger.awaits(1, base=2) == 1
    counts = await store.runs.run_counts(ledger.run_id)
    assert (counts.num_discarded_groups, counts.num_ready_groups) == (1, 1)
    assert names(await ledger.lease(1, base=2)) == ["b/0", "b/1"]
    await ledger.complete("c", version=1)
    assert await ledger.awaits(1, base=9) == 0


async def test_masked_groups_are_served(store: Store) -> None:
    """Under MASK age is the samples' matter, not the queue's."""
    ledger = await ledger_of(store, staleness_policy=StalenessPolicy.MASK)
    await ledger.complete("a")
    await ledger.lead()
    assert await ledger.awaits(1, base=9) == 0
    assert names(await ledger.lease(1, base=9)) == ["a/0", "a/1"]


@pytest.mark.parametrize(
    ("window", "done", "step"),
    [
        (0, "edc", "ed"),
        (2, "edc", None),
        (2, "edca", None),
        (2, "edcb", None),
        (2, "edcab", "ab"),
        (2, "dba", "ba"),
        (3, "edcb", "cb"),
        (3, "edca", "ca"),
        (4, "edc", "dc"),
        (9, "edc", "ed"),
    ],
)
async def test_a_window_holds_back_what_overtook_its_head(
    store: Store, window: int, done: str, step: str | None
) -> None:
    """Groups complete in the order of `done`; the step takes the oldest completed in the window."""
    ledger = await ledger_of(store, replace(WIDE, fifo_window=window))
    await ledger.admit(*"abcde")
    await ledger.finish(*done)
    await ledger.lead()
    lease = (await ledger.attempt(1)).lease
    taken = None if lease is None else "".join(name[0] for name in lease.sample_ids)
    assert taken == step


async def test_the_window_moves_with_its_head(store: Store) -> None:
    """A leased or dropped group moves it forward, a returned one back."""
    ledger = await ledger_of(store, replace(WIDE, fifo_window=2, max_staleness=3))
    await ledger.admit(*"abcdef")
    await ledger.finish("a", version=0)
    await ledger.finish(*"bcdf", version=4)
    await ledger.lead()
    assert names(await ledger.lease(1, base=4)) == ["b/0", "c/0"]  # a is too old
    assert (await ledger.attempt(2, base=4)).lease is None  # f may not overtake e
    await ledger.commit(1)
    await ledger.finish("e", version=4)
    assert names(await ledger.lease(2, base=4)) == ["d/0", "e/0"]
    await ledger.lead("two", step=0)
    assert names(await ledger.lease(1, base=4)) == ["d/0", "e/0"]


async def test_a_poison_step_becomes_dead_letters(store: Store) -> None:
    """Delivered max_deliveries times without a commit; those after it return in order."""
    ledger = await ledger_of(store, replace(WIDE, groups_per_step=1, max_deliveries=2))
    await ledger.complete(*"abc")
    await ledger.lead("one")
    assert (await ledger.lease(1)).num_deliveries == 1
    await ledger.lead("one")
    assert (await ledger.lease(1)).num_deliveries == 1
    for step in (2, 3):
        await ledger.lease(step)
    await ledger.lead("two")
    assert ledger.pending == (1, 2, 3)
    assert (await ledger.lease(1)).num_deliveries == 2
    before = await store.runs.run_counts(ledger.run_id)
    await ledger.lead("three")
    assert not ledger.pending
    (letter,) = await store.runs.dead_letters(ledger.run_id, 0, 9)
    assert (letter.task.task_id, letter.reason) == ("a", DeadLetterReason.DELIVERIES)
    assert letter.message == "step 1 was delivered 2 times and never committed"
    after = await store.runs.run_counts(ledger.run_id)
    assert after.num_discarded_groups == before.num_discarded_groups + 1
    assert after.num_ready_groups == 2
    assert after.num_admissible_groups == WIDE.max_staleness + 1 - 2
    assert [names(await ledger.lease(step)) for step in (1, 2)] == [["b/0"], ["c/0"]]


async def test_a_trainer_that_does_not_report_waiting_is_not_assumed_to_train(store: Store) -> None:
    """One that leases when enough is ready, without reporting, must never wait forever."""
    ledger = await ledger_of(store, WIDE, groups_per_step=1, max_staleness=0)
    await ledger.lead()
    for step, name in enumerate("abc", start=1):
        await ledger.complete(name)
        await ledger.lease(step)
    await ledger.awaits(4)
    await ledger.complete("d")
    await ledger.lease(4)
    await ledger.admit("e")
    assert "e" not in ledger.running, "this one tells, so it is waited for"
    await ledger.lead("that does not report waiting")
    await ledger.lease(4)
    assert (await ledger.attempt(5)).lease is None
    await ledger.complete("e")
    await ledger.lease(5)
    await ledger.complete("f")


async def test_a_trainer_that_never_leases_poisons_nothing(store: Store) -> None:
    """Only what a trainer was given counts: one that cannot even start gives nothing up."""
    ledger = await ledger_of(store, replace(WIDE, groups_per_step=1, max_deliveries=2))
    await ledger.complete("a", "b")
    await ledger.lead("one")
    await ledger.lease(1)
    await ledger.lease(2)
    for number in range(5):
        await ledger.lead(f"broken-{number}")
    assert ledger.pending == (1, 2)
    await ledger.lead("two")
    assert (await ledger.lease(1)).num_deliveries == 2
    await ledger.lead("three")
    assert not ledger.pending
    assert names(await ledger.lease(1)) == ["b/0"]


async def test_steps_that_were_only_repeated_stay(store: Store) -> None:
    """Each trainer repeats them since the checkpoint and ends at the third, which alone is bad."""
    ledger = await ledger_of(store, replace(WIDE, groups_per_step=1, max_deliveries=2))
    await ledger.complete(*"abcd")
    for trainer in ("one", "two"):
        await ledger.lead(trainer)
        for step in (1, 2, 3):
            await ledger.lease(step)
    await ledger.lead("three")
    assert ledger.pending == (1, 2)
    (letter,) = await store.runs.dead_letters(ledger.run_id, 0, 9)
    assert letter.task.task_id == "c"
    assert [names(await ledger.lease(step))[0] for step in (1, 2, 3)] == ["a/0", "b/0", "d/0"]


async def test_a_committed_step_is_never_poisonous(store: Store) -> None:
    """What the checkpoint covers is consumed, however often it was delivered."""
    ledger = await ledger_of(store, max_deliveries=1)
    await ledger.complete("a", "b")
    await ledger.lead("one")
    await ledger.lease(1)
    await ledger.lead("two", step=1)
    assert not await store.runs.dead_letters(ledger.run_id, 0, 9)
    assert await store.ledger.committed_steps(ledger.run_id, ["a/0/1"]) == [1]


async def test_without_a_limit_a_step_is_delivered_for_ever(store: Store) -> None:
    """The control: max_deliveries 0 gives nothing up."""
    ledger = await ledger_of(store)
    await ledger.complete("a")
    for number in range(5):
        await ledger.lead(f"trainer-{number}")
        assert (await ledger.lease(1)).num_deliveries == number + 1


async def test_a_commit_records_the_trained_rollouts(store: Store) -> None:
    """Of each slot the attempt that counted; not failed ones, surplus ones, or other groups."""
    ledger = await ledger_of(store, num_extra_samples=1)
    await ledger.admit("a")
    await ledger.finish_slots("a", [1, 2])
    await ledger.complete("b")
    await ledger.lead()
    await ledger.lease(1)
    rollouts = ["a/0/1", "a/1/1", "a/2/1", "a/1/2", "b/0/1", "eval", "x/0/1"]
    committed = store.ledger.committed_steps
    assert await committed(ledger.run_id, rollouts) == [0] * 7
    await ledger.commit(1)
    assert await committed(ledger.run_id, rollouts) == [0, 1, 1, 0, 0, 0, 0]


async def test_a_publish_waits_for_what_it_would_make_too_old(store: Store) -> None:
    """Groups with a finished sample that is too old, and running rollouts of the others."""
    rules = replace(RULES, group_size=2, max_staleness=3)
    ledger = await ledger_of(
        store, rules, staleness_policy=StalenessPolicy.WAIT, publish_wait_seconds=60.0
    )
    await ledger.complete("a", version=2)
    await ledger.admit("b", "c")
    await ledger.finish_slots("b", [0], version=1)
    await ledger.lead()
    assert (await ledger.publish(4)).running == ("b/1/1", "c/0/1", "c/1/1")
    waits = await ledger.publish(5)
    assert (waits.num_blocking_groups, waits.running) == (1, ("c/0/1", "c/1/1"))
    assert 0 < waits.seconds <= 60.0
    assert (await ledger.publish(6)).num_blocking_groups == 2
    assert names(await ledger.lease(1, base=4)) == ["a/0", "a/1"]
    assert (await ledger.publish(6)).num_blocking_groups == 1


async def test_a_publish_waits_no_longer_than_the_run_allows(store: Store) -> None:
    """Time counts from the first ask for a version; another version starts again."""
    ledger = await ledger_of(
        store, staleness_policy=StalenessPolicy.WAIT, publish_wait_seconds=1e-6
    )
    await ledger.complete("a")
    await ledger.lead()
    await ledger.publish(9)
    while (waits := await ledger.publish(9)).seconds > 0:
        pass
    assert waits.num_blocking_groups == 1


async def test_other_policies_publish_at_once(run: Run) -> None:
    """Only WAIT lets a publish wait."""
    ledger = Ledger(run.store, run.run_id)
    await ledger.complete("a")
    await ledger.lead()
    waits = await ledger.publish(9)
    assert (waits.seconds, waits.num_blocking_groups, waits.running) == (0.0, 0, ())
