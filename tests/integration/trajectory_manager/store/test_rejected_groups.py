"""Groups that the trainer cannot train: on all implementations of the ledger."""

from __future__ import annotations

from services.chassis.errors import Reason
from tests.integration.trajectory_manager.ledger import WIDE, Ledger, ledger_of, names
from tests.lib.trajectory_manager.support import refused
from trajectory_manager.model.records import DeadLetterReason, ReplayStrategy
from trajectory_manager.model.runs import Replay
from trajectory_manager.store.redis.connect import Store


async def leased(store: Store, *ready: str, **changes: int) -> Ledger:
    """A trainer with step 1 of two groups; further ones are ready."""
    ledger = await ledger_of(store, WIDE, **changes)
    await ledger.complete("a", "b", *ready)
    await ledger.lead()
    await ledger.lease(1)
    return ledger


async def test_a_rejected_group_is_a_dead_letter_and_another_takes_its_place(store: Store) -> None:
    """The others keep their places, and a repeated step is the one that was trained."""
    ledger = await leased(store, "c")
    rejected = await ledger.reject(1, {"a": "reward 1e308"})
    assert (rejected.num_rejected, rejected.open) == (1, True)
    assert await ledger.reject(1, {"a": "reward 1e308"}) == type(rejected)(
        num_rejected=0, open=True
    ), "idempotent"
    (letter,) = await store.runs.dead_letters(ledger.run_id, 0, 9)
    assert (letter.task.task_id, letter.message) == ("a", "reward 1e308")
    assert letter.reason is DeadLetterReason.REJECTED
    whole = await ledger.lease(1)
    assert names(whole) == ["b/0", "c/0"]
    await ledger.lead("two")
    assert names(await ledger.lease(1)) == names(whole)
    assert await ledger.commit(1) == 2


async def test_its_capacity_returns_though_admission_is_closed_while_a_step_is_trained(
    store: Store,
) -> None:
    """With a batch at most admitted, the replacement is: else the step would wait for ever."""
    ledger = await leased(store, max_staleness=0)
    before = await store.runs.run_counts(ledger.run_id)
    assert before.num_open_groups == 0
    await ledger.reject(1, {"b": "bad"})
    counts = await store.runs.run_counts(ledger.run_id)
    assert (counts.num_open_groups, counts.num_admissible_groups) == (1, 1)
    await ledger.complete("c")
    assert names(await ledger.lease(1)) == ["a/0", "c/0"]


async def test_steps_leased_later_return_to_the_queue(store: Store) -> None:
    """They may replace what was rejected; an open step is followed by none."""
    ledger = await leased(store, "c", "d")
    await ledger.lease(2)
    await ledger.reject(1, {"a": "bad"})
    await refused(Reason.STEP_OUT_OF_ORDER, ledger.attempt(2))
    assert names(await ledger.lease(1)) == ["b/0", "c/0"]
    await ledger.complete("e")
    assert names(await ledger.lease(2)) == ["d/0", "e/0"]


async def test_a_streamed_step_loses_it_before_it_is_whole(store: Store) -> None:
    """It stays open, with what else it has."""
    ledger = await ledger_of(store, WIDE)
    await ledger.complete("a")
    await ledger.lead()
    await ledger.stream(1)
    assert (await ledger.reject(1, {"a": "bad"})).num_rejected == 1
    await ledger.complete("b", "c")
    assert names(await ledger.stream(1)) == ["b/0", "c/0"]


async def test_a_replayed_group_leaves_the_step_and_the_replay(store: Store) -> None:
    """Without replacement: the step stays whole."""
    replay = Replay(
        strategy=ReplayStrategy.RECENCY, capacity_groups=5, groups_per_step=1, reward_name="reward"
    )
    ledger = await ledger_of(store, WIDE, groups_per_step=1, replay=replay)
    await ledger.complete("a", "b", "c")
    await ledger.lead()
    await ledger.lease(1)
    await ledger.commit(1)
    assert (await ledger.lease(2)).replayed_ids
    rejected = await ledger.reject(2, {"a": "bad"})
    assert (rejected.num_rejected, rejected.open) == (1, False)
    assert not (await ledger.lease(2)).replayed_ids
    await ledger.commit(2)
    assert (await ledger.lease(3)).replayed_ids[0].startswith("b/")


async def test_a_trainer_that_was_replaced_and_a_committed_step_reject_nothing(
    store: Store,
) -> None:
    """Fenced like every write of a trainer."""
    ledger = await leased(store)
    old = ledger.epoch
    await ledger.lead("two")
    new, ledger.epoch = ledger.epoch, old
    await refused(Reason.STALE_EPOCH, ledger.reject(1, {"a": "bad"}))
    ledger.epoch = new
    await ledger.commit(1)
    await refused(Reason.NOT_FOUND, ledger.reject(1, {"a": "bad"}))
    assert not await store.runs.dead_letters(ledger.run_id, 0, 9)
