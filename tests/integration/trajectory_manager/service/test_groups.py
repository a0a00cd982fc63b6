"""Groups that start more samples than they need: the first to finish count, nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.chassis.errors import Reason
from tests.lib.trajectory_manager.support import (
    RULES,
    Run,
    failed,
    other_run,
    policy,
    refused,
    rewarded,
    tokens,
)
from trajectory_manager.model.records import (
    MAX_REPLACEMENTS,
    Durability,
    FailureClass,
    Outcome,
    Purpose,
    RolloutState,
    TaskLease,
)
from trajectory_manager.model.runs import StepLease
from trajectory_manager.service.rollouts import SURPLUS
from trajectory_manager.store.redis.connect import SCRIPTS, Store, redis_store


async def begun(run: Run, number: int) -> list[TaskLease]:
    """Leased rollouts, each with one complete turn."""
    leases = []
    for _ in range(number):
        lease = await run.lease()
        assert lease is not None
        await run.start(lease.rollout_id, lease.nonce)
        await run.turn(lease.rollout_id, "t1", [1, 2], [3], policy())
        leases.append(lease)
    return leases


async def first_step(run: Run) -> StepLease:
    """What a new trainer gets for step 1."""
    ledger = run.store.ledger
    epoch = (await ledger.reconcile(run.run_id, 0, "trainer")).epoch
    lease = (await ledger.lease_samples(run.run_id, epoch, 1, 0, 0)).lease
    assert lease is not None
    return lease


async def test_a_group_is_complete_with_the_samples_that_finish_first(store: Store) -> None:
    """The trainer gets those, in slot order; leases of the others end and are not counted."""
    run = await other_run(store, num_extra_samples=2)
    await run.submit("a")
    leases = await begun(run, 3)
    unstarted = await run.lease()
    assert unstarted is not None
    await run.finish(leases[2].rollout_id)
    await run.finish(leases[0].rollout_id)
    counts = await store.runs.run_counts(run.run_id)
    assert (counts.num_ready_groups, counts.num_running_rollouts) == (1, 0)
    proofs = [(leases[1].rollout_id, leases[1].nonce), (unstarted.rollout_id, unstarted.nonce)]
    assert await store.runs.extend_tasks(run.run_id, proofs) == [False, False]
    await refused(Reason.LEASE_EXPIRED, run.start(unstarted.rollout_id, unstarted.nonce))
    assert await run.lease() is None
    assert (await first_step(run)).sample_ids == ("a/0/1#t1", "a/2/1#t1")


async def test_surplus_rollouts_keep_their_tokens(store: Store) -> None:
    """The sweep closes them as CANCELLED with all they recorded, also those that never started."""
    run = await other_run(store, num_extra_samples=2)
    await run.submit("a")
    leases = await begun(run, 2)
    partial, unstarted = await run.lease(), await run.lease()
    assert partial is not None
    assert unstarted is not None
    await run.start(partial.rollout_id, partial.nonce)
    epoch = (await run.begin(partial.rollout_id, "t", [1])).epoch
    await run.append(partial.rollout_id, "t", epoch, 0, tokens([1, 2], policy()))
    for lease in leases:
        await run.finish(lease.rollout_id)
    assert await run.rollouts.sweep(run.run_id) == 2
    assert await run.rollouts.sweep(run.run_id) == 0
    for lease in (partial, unstarted):
        rollout = await store.tokens.rollout(run.run_id, lease.rollout_id)
        assert rollout is not None
        assert (rollout.state, rollout.outcome) == (RolloutState.FAILED, SURPLUS)
    assert SURPLUS.failure_class is FailureClass.CANCELLED
    late = run.append(partial.rollout_id, "t", epoch, 2, tokens([3], policy()))
    await refused(Reason.ROLLOUT_FINISHED, late)
    stored = await store.tokens.tokens(run.run_id, partial.rollout_id, ["t"])
    assert stored == [tokens([1, 2], policy())]


@pytest.mark.parametrize("swept", [False, True])
async def test_a_surplus_rollout_that_finishes_late_is_not_trained(
    store: Store, swept: bool
) -> None:
    """Before the sweep its finish is recorded, after it the agent gets an error."""
    run = await other_run(store, num_extra_samples=1)
    await run.submit("a")
    leases = await begun(run, 3)
    for lease in leases[:2]:
        await run.finish(lease.rollout_id)
    late = leases[2].rollout_id
    if swept:
        await run.rollouts.sweep(run.run_id)
        error = await refused(Reason.ROLLOUT_FINISHED, run.finish(late))
        assert SURPLUS.failure_message in error.message
    else:
        await run.finish(late, rewarded(0.5))
        assert await run.rollouts.sweep(run.run_id) == 0
    assert (await first_step(run)).sample_ids == ("a/0/1#t1", "a/1/1#t1")
    counts = await store.runs.run_counts(run.run_id)
    assert (counts.num_ready_groups, counts.num_running_groups) == (0, 0)


async def test_a_failed_sample_is_replaced_while_its_group_still_needs_it(store: Store) -> None:
    """The others continue, and a slot that is open when the group completes is not leased again."""
    run = await other_run(store, num_extra_samples=1)
    await run.submit("a")
    leases = await begun(run, 3)
    await run.finish(leases[0].rollout_id, failed())
    again = await begun(run, 1)
    assert again[0].rollout_id == "a/0/2"
    await run.finish(leases[1].rollout_id)
    await run.finish(again[0].rollout_id, failed())
    await run.finish(leases[2].rollout_id)
    assert await run.lease() is None
    assert (await first_step(run)).sample_ids == ("a/1/1#t1", "a/2/1#t1")
    counts = await store.runs.run_counts(run.run_id)
    assert (counts.num_replaced_samples, counts.num_discarded_groups) == (2, 0)


async def test_a_discarded_group_closes_its_running_rollouts(store: Store) -> None:
    """Nothing stays open for ever when the group of a running rollout is given up."""
    run = await other_run(store, num_extra_samples=1)
    await run.submit("a")
    (other,) = await begun(run, 1)
    for _ in range(MAX_REPLACEMENTS + 1):
        assert await run.play(outcome=failed())
    await run.rollouts.sweep(run.run_id)
    rollout = await store.tokens.rollout(run.run_id, other.rollout_id)
    assert rollout is not None
    assert rollout.outcome == SURPLUS


async def test_evaluations_start_no_extra_samples(store: Store) -> None:
    """An EVAL task makes exactly as many rollouts as it asks for."""
    run = await other_run(store, num_extra_samples=3)
    await run.submit("eval", num_samples=2, purpose=Purpose.EVAL)
    assert [lease is not None for lease in [await run.lease() for _ in range(3)]] == [
        True,
        True,
        False,
    ]


async def test_variance_is_that_of_the_samples_that_count(store: Store) -> None:
    """A surplus sample neither saves a group without variance nor holds up one that has it."""
    run = await other_run(store, num_extra_samples=1, zero_variance_reward="reward")
    await run.submit("a", "b")
    for values in ((1.0, 1.0, 0.0), (1.0, 0.0, 1.0)):
        leases = await begun(run, 3)
        for lease, value in zip(leases, values, strict=True):
            await run.finish(lease.rollout_id, rewarded(value))
    counts = await store.runs.run_counts(run.run_id)
    assert (counts.num_ready_groups, counts.num_discarded_groups) == (1, 1)


async def test_a_sample_without_trained_tokens_makes_no_group_old(run: Run) -> None:
    """Its reward stands, and the age of the group is that of the tokens that are trained."""
    await run.submit("a")
    await run.play(version=5)
    lease = await run.lease()
    assert lease is not None
    await run.start(lease.rollout_id, lease.nonce)
    refusal = Outcome(rewards=rewarded(0.0).rewards, failure_class=FailureClass.POLICY)
    await run.finish(lease.rollout_id, refusal)
    ledger = run.store.ledger
    epoch = (await ledger.reconcile(run.run_id, 0, "trainer")).epoch
    attempt = await ledger.lease_samples(run.run_id, epoch, 1, 5, 0)
    assert attempt.num_too_old == 0
    assert attempt.lease is not None
    assert attempt.lease.sample_ids == ("a/0/1#t1",)


async def test_without_its_check_a_late_sample_is_trained(redis_url: str, tmp_path: Path) -> None:
    """The script ignores it by the state of its slot; the same script without that does not."""
    unchecked = tmp_path / "lua"
    unchecked.mkdir()
    for path in SCRIPTS.glob("*.lua"):
        source = path.read_text()
        if path.stem == "settle_rollouts":
            assert source.count("slot.state ~= 'leased' or ") == 1
            source = source.replace("slot.state ~= 'leased' or ", "")
        (unchecked / path.name).write_text(source)
    async with redis_store(redis_url, Durability.FAST, 5.0, unchecked) as store:
        run = await other_run(store, num_extra_samples=1)
        await run.submit("a")
        for lease in await begun(run, 3):
            await run.finish(lease.rollout_id)
        assert len((await first_step(run)).sample_ids) == RULES.group_size + 1
