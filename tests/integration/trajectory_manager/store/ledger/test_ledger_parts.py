"""Part of a batch, for a trainer that waits no longer: on all implementations of the ledger."""

from __future__ import annotations

from dataclasses import replace

from services.chassis.errors import Reason
from tests.integration.trajectory_manager.ledger import WIDE, ledger_of, names
from tests.lib.trajectory_manager.support import refused
from trajectory_manager.store.redis.connect import Store


async def test_a_part_takes_what_is_ready_and_leaves_the_rest(store: Store) -> None:
    """A trainer that waits no longer gets whole groups; the others are in the next step, once."""
    ledger = await ledger_of(store, WIDE, groups_per_step=3, max_staleness=0)
    await ledger.admit("a", "b", "c")
    await ledger.lead()
    assert (await ledger.attempt(1, min_groups=1)).lease is None, "nothing is complete"
    await ledger.finish("a")
    assert (await ledger.attempt(1)).lease is None, "the batch is not whole"
    assert (await ledger.attempt(1, min_groups=2)).lease is None, "less than the least part"
    part = await ledger.lease_part(1)
    assert names(part) == ["a/0"]
    await ledger.finish("b", "c")
    assert await ledger.lease(1) == part, "a repeated step is what it was"
    await ledger.admit("d", "e")
    assert list(ledger.running) == ["a", "b", "c", "d"], "it frees the room of what it took"
    await ledger.finish("d")
    assert names(await ledger.lease(2)) == ["b/0", "c/0", "d/0"]
    await refused(Reason.INVALID_FIELD, ledger.attempt(3, min_groups=4))


async def test_a_whole_batch_is_taken_though_a_part_would_do(store: Store) -> None:
    """And no more than a batch."""
    ledger = await ledger_of(store, WIDE)
    await ledger.complete("a", "b", "c")
    await ledger.lead()
    assert names(await ledger.lease_part(1)) == ["a/0", "b/0"]
    assert names(await ledger.lease_part(2)) == ["c/0"]


async def test_a_part_is_committed_as_a_whole_batch_is(store: Store) -> None:
    """A newer trainer gets the same part; the next step takes what is left."""
    ledger = await ledger_of(store, WIDE)
    await ledger.complete("a")
    await ledger.lead()
    part = await ledger.lease_part(1)
    await ledger.complete("b", "c")
    await ledger.lead("two")
    assert ledger.pending == (1,)
    assert await ledger.lease(1) == replace(part, num_deliveries=2)
    counts = await store.runs.run_counts(ledger.run_id)
    assert (counts.num_ready_groups, counts.num_running_groups) == (2, 0)
    assert names(await ledger.lease_part(2)) == ["b/0", "c/0"]
    assert await ledger.commit(2) == 3


async def test_groups_beyond_the_window_are_kept_back(store: Store) -> None:
    """They are ready, but a trainer that counted on them would wait for the one ahead in vain."""
    ledger = await ledger_of(store, WIDE, fifo_window=2)
    await ledger.admit("a", "b", "c", "d")
    await ledger.finish("c", "d", "b")
    await ledger.lead()
    counts = await store.runs.run_counts(ledger.run_id)
    assert (counts.num_ready_groups, counts.num_kept_back_groups) == (3, 2)
    assert names(await ledger.lease_part(1)) == ["b/0"]
    counts = await store.runs.run_counts(ledger.run_id)
    assert (counts.num_ready_groups, counts.num_kept_back_groups) == (2, 1)
    await ledger.finish("a")
    assert names(await ledger.lease(2)) == ["c/0", "a/0"]
