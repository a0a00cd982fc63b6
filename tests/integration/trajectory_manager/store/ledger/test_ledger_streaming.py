"""Steps that grow while the trainer works on them: on all implementations of the ledger."""

from __future__ import annotations

from dataclasses import replace

from services.chassis.errors import Reason
from tests.integration.trajectory_manager.ledger import WIDE, ledger_of, names
from tests.lib.trajectory_manager.support import refused
from trajectory_manager.model.records import ReplayStrategy
from trajectory_manager.model.runs import Replay
from trajectory_manager.store.redis.connect import Store


async def test_an_open_step_takes_groups_as_they_come(store: Store) -> None:
    """In the order they are complete, up to a batch; what it has never changes."""
    ledger = await ledger_of(store, WIDE, groups_per_step=3)
    await ledger.admit("a", "b", "c", "d")
    await ledger.lead()
    assert (await ledger.attempt(1, streaming=True)).lease is None, "nothing is complete"
    await ledger.finish("b")
    part = await ledger.stream(1)
    assert (names(part), part.is_open) == (["b/0"], True)
    assert await ledger.stream(1) == part, "nothing came meanwhile"
    await ledger.finish("a")
    assert names(await ledger.stream(1)) == ["b/0", "a/0"]
    await ledger.finish("d", "c")
    whole = await ledger.stream(1)
    assert (names(whole), whole.is_open) == (["b/0", "a/0", "d/0"], False)
    assert await ledger.stream(1) == whole == await ledger.lease(1)
    assert await ledger.commit(1) == 3


async def test_a_step_that_is_whole_at_once_is_like_any_other(store: Store) -> None:
    """Streaming changes when samples are given out, not which; the entry tells how it was."""
    leases = []
    for streaming in (False, True):
        ledger = await ledger_of(store, WIDE)
        await ledger.complete("a", "b", "c")
        await ledger.lead()
        leases.append((await ledger.attempt(1, streaming=streaming)).lease)
    assert leases[0] is not None
    assert leases[1] == replace(leases[0], streamed=True)


async def test_the_next_trainer_learns_how_a_step_was_taken(store: Store) -> None:
    """Whether it was streamed, and from which version it began: it is computed alike."""
    for streaming in (False, True):
        ledger = await ledger_of(store, WIDE, groups_per_step=2)
        await ledger.complete("a")
        await ledger.lead("one")
        first = await ledger.attempt(1, streaming=streaming)
        await ledger.complete("b")
        whole = await ledger.attempt(1, streaming=streaming)
        assert whole.lease is not None
        assert (first.lease is not None, whole.lease.streamed) == (streaming, streaming)
        await ledger.lead("two")
        again = await ledger.attempt(1, streaming=not streaming)
        assert again.lease == replace(whole.lease, num_deliveries=2)


async def test_a_trainer_that_waits_no_longer_closes_the_step(store: Store) -> None:
    """With what it has, if that is enough; the rest is for the next one."""
    ledger = await ledger_of(store, WIDE, groups_per_step=3)
    await ledger.complete("a")
    await ledger.lead()
    part = await ledger.stream(1)
    attempt = await ledger.attempt(1, min_groups=2)
    assert attempt.lease == part, "open still: two groups are the least"
    closed = await ledger.lease_part(1)
    assert closed == replace(part, is_open=False)
    await ledger.complete("b")
    assert await ledger.stream(1) == closed, "it takes no more"
    assert names(await ledger.stream(2)) == ["b/0"]


async def test_an_open_step_continues_under_the_next_trainer(store: Store) -> None:
    """With the samples it had, in their order, and the version it began with."""
    ledger = await ledger_of(store, WIDE)
    await ledger.complete("a")
    await ledger.lead("one")
    part = await ledger.stream(1, base=3)
    await ledger.complete("b")
    await ledger.lead("two")
    assert ledger.pending == (1,)
    whole = await ledger.stream(1, base=9)
    assert names(whole) == [*names(part), "b/0"]
    assert (whole.base_weight_version, whole.num_deliveries) == (3, 2)


async def test_an_open_step_comes_back_as_it_went(store: Store) -> None:
    """A restore undoes it: its groups are ready again, and none is counted twice."""
    ledger = await ledger_of(store, WIDE, groups_per_step=3, max_staleness=0)
    await ledger.complete("a", "b")
    await ledger.admit("c")
    await ledger.lead()
    before = await store.runs.run_counts(ledger.run_id)
    await ledger.stream(1)
    streaming = await store.runs.run_counts(ledger.run_id)
    assert (streaming.num_ready_groups, streaming.num_running_groups) == (0, 1)
    assert streaming.num_admissible_groups == before.num_admissible_groups == 0
    await ledger.finish("c")
    await ledger.stream(1)
    await ledger.commit(1)
    await ledger.complete("d")
    await ledger.stream(2)
    await ledger.lead("two", step=0)
    counts = await store.runs.run_counts(ledger.run_id)
    assert (counts.num_ready_groups, counts.num_running_groups) == (1, 0)


async def test_a_checkpoint_covers_a_step_whose_end_was_lost(store: Store) -> None:
    """A store may forget the last second: what it has of the step is consumed all the same."""
    ledger = await ledger_of(store, WIDE)
    await ledger.complete("a")
    await ledger.lead("one")
    await ledger.stream(1)
    await ledger.lead("two", step=1)
    assert ledger.pending == ()
    await ledger.complete("b", "c", "d", "e", "f")
    counts = await store.runs.run_counts(ledger.run_id)
    assert (counts.num_ready_groups, counts.num_running_groups) == (5, 0)
    assert names(await ledger.stream(2)) == ["b/0", "c/0"]


async def test_an_open_step_delivered_too_often_becomes_dead_letters(store: Store) -> None:
    """Its groups are dead letters, and admission has their room back."""
    ledger = await ledger_of(store, WIDE, groups_per_step=3, max_deliveries=1)
    await ledger.complete("a")
    await ledger.lead("one")
    before = await store.runs.run_counts(ledger.run_id)
    await ledger.stream(1)
    await ledger.lead("two")
    assert ledger.pending == ()
    counts = await store.runs.run_counts(ledger.run_id)
    assert counts.num_dead_letters == 1
    assert counts.num_admissible_groups == before.num_admissible_groups + 1
    assert counts.num_running_groups == 0


async def test_a_window_is_as_wide_for_an_open_step(store: Store) -> None:
    """It takes the groups that the whole batch would: no later one slips in as it moves on."""
    ledger = await ledger_of(store, WIDE, groups_per_step=3, fifo_window=3)
    await ledger.admit("a", "b", "c", "d")
    await ledger.lead()
    await ledger.finish("b", "d", "c")
    assert names(await ledger.stream(1)) == ["b/0", "c/0"]
    counts = await store.runs.run_counts(ledger.run_id)
    assert (counts.num_ready_groups, counts.num_kept_back_groups) == (1, 1)
    assert names(await ledger.stream(1)) == ["b/0", "c/0"], "a still runs"
    await ledger.finish("a")
    assert names(await ledger.stream(1)) == ["b/0", "c/0", "a/0"]
    await ledger.admit("e", "f")
    await ledger.finish("e", "f")
    assert names(await ledger.stream(2)) == ["d/0", "e/0", "f/0"]


async def test_replayed_groups_come_last(store: Store) -> None:
    """They are drawn when the step is whole, and not from its own groups."""
    replay = Replay(strategy=ReplayStrategy.RECENCY, capacity_groups=2, groups_per_step=1)
    ledger = await ledger_of(store, WIDE, replay=replay)
    await ledger.complete("a", "b")
    await ledger.lead()
    await ledger.stream(1)
    await ledger.commit(1)
    await ledger.complete("c")
    assert (await ledger.stream(2)).replayed_ids == ()
    await ledger.complete("d")
    whole = await ledger.stream(2)
    assert names(whole) == ["c/0", "d/0"]
    assert whole.replayed_ids[0].split("/")[0] in ("a", "b")


async def test_an_open_step_is_neither_passed_nor_committed(store: Store) -> None:
    """It is leased until it is complete."""
    ledger = await ledger_of(store, WIDE, groups_per_step=3)
    await ledger.complete("a")
    await ledger.lead()
    await ledger.stream(1)
    await refused(Reason.STEP_OUT_OF_ORDER, ledger.attempt(2))
    await refused(Reason.STEP_OUT_OF_ORDER, ledger.commit(1))
