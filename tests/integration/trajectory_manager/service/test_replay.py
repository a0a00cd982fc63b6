"""Replay: trained groups are drawn again, always the same ones, and never count as fresh."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest

from tests.integration.trajectory_manager.ledger import Ledger, ledger_of, names
from tests.lib.trajectory_manager.memory.replay_draw import ReplayGroup, draw, trim
from tests.lib.trajectory_manager.support import RULES
from trajectory_manager.model.records import ReplayStrategy, StalenessPolicy
from trajectory_manager.model.runs import Replay
from trajectory_manager.store.redis.connect import Store

RECENCY = Replay(strategy=ReplayStrategy.RECENCY, capacity_groups=4, groups_per_step=2)
REWARD = Replay(
    strategy=ReplayStrategy.REWARD,
    capacity_groups=4,
    groups_per_step=2,
    reward_name="reward",
    temperature=0.5,
)
RULES_OF_TWO = replace(RULES, max_staleness=9)


async def trained(store: Store, rules: Replay, *task_ids: str) -> Ledger:
    """A run that has trained these groups, one in each step, rewards growing."""
    ledger = await ledger_of(store, RULES_OF_TWO, replay=rules)
    await ledger.lead()
    for step, task_id in enumerate(task_ids, 1):
        await ledger.complete(task_id, rewards={"reward": (step / 7, 0.1)})
        await ledger.lease(step)
        await ledger.commit(step)
    return ledger


def groups_of(*task_ids: str) -> dict[str, ReplayGroup]:
    """What `trained` keeps."""
    return {
        task_id: ReplayGroup(
            samples=(f"{task_id}/0/1#t", f"{task_id}/1/1#t"),
            reward=(step / 7 + 0.1) / 2,
            step=step,
        )
        for step, task_id in enumerate(task_ids, 1)
    }


@pytest.mark.parametrize("rules", [RECENCY, REWARD])
async def test_every_store_draws_by_the_rule(store: Store, rules: Replay) -> None:
    """Seeded by run and step, from the newest groups the run keeps."""
    ledger = await trained(store, rules, *"abcdef")
    kept = groups_of(*"abcdef")
    trim(kept, rules.capacity_groups)
    assert sorted(kept) == ["c", "d", "e", "f"]
    for step in range(7, 14):
        await ledger.complete(f"fresh-{step}")
        lease = await ledger.lease(step)
        drawn = draw(kept, rules, ledger.run_id, step, set())
        assert lease.replayed_ids == tuple(name for task in drawn for name in kept[task].samples)
        assert names(lease) == [f"fresh-{step}/0", f"fresh-{step}/1"]
    assert (await store.runs.run_counts(ledger.run_id)).num_replay_groups == 4


async def test_a_repeated_lease_replays_the_same(store: Store) -> None:
    """Also for the next trainer, and after other groups were committed."""
    ledger = await trained(store, RECENCY, *"abc")
    await ledger.complete("x", "y")
    first, second = await ledger.lease(4), await ledger.lease(5)
    assert len(first.replayed_ids) == 4
    await ledger.commit(4)
    assert await ledger.lease(5) == second
    await ledger.lead("two", step=4)
    assert await ledger.lease(5) == replace(second, num_deliveries=2)


async def test_replay_takes_no_part_in_admission(store: Store) -> None:
    """Counts, commits and later leases are those of the fresh groups alone."""
    ledger = await trained(store, RECENCY, *"abc")
    await ledger.complete("x")
    lease = await ledger.lease(4, base=9)  # everything kept is 9 versions old
    assert len(lease.replayed_ids) == 4
    assert await ledger.commit(4) == 2
    counts = await store.runs.run_counts(ledger.run_id)
    assert (counts.num_admitted_groups, counts.num_discarded_groups) == (4, 0)
    assert counts.num_admissible_groups == RULES_OF_TWO.max_outstanding_groups()
    assert counts.num_ready_groups == 0
    assert (await ledger.attempt(5)).lease is None


async def test_as_many_as_there_are(store: Store) -> None:
    """The first step replays nothing, the second what the first one trained."""
    ledger = await ledger_of(store, RULES_OF_TWO, replay=RECENCY)
    await ledger.complete(*"abc")
    await ledger.lead()
    assert (await ledger.lease(1)).replayed_ids == ()
    assert (await ledger.lease(2)).replayed_ids == ()  # leased is not committed
    await ledger.commit(2)
    assert len((await ledger.lease(3)).replayed_ids) == 4


async def test_without_replay_nothing_is_trained_again(store: Store) -> None:
    """The control: no group is kept."""
    ledger = await ledger_of(store, RULES_OF_TWO)
    await ledger.complete(*"ab")
    await ledger.lead()
    await ledger.lease(1)
    await ledger.commit(1)
    assert (await ledger.lease(2)).replayed_ids == ()
    assert (await store.runs.run_counts(ledger.run_id)).num_replay_groups == 0


async def test_withheld_groups_are_replayed(store: Store) -> None:
    """WITHHOLD keeps them for this; DROP does not."""
    for policy, replayed in (
        (StalenessPolicy.WITHHOLD, ("old/0/1#t", "old/1/1#t")),
        (StalenessPolicy.DROP, ()),
    ):
        ledger = await ledger_of(store, replay=RECENCY, staleness_policy=policy)
        await ledger.complete("old", version=0)
        await ledger.complete("new", version=5)
        await ledger.lead()
        lease = await ledger.lease(1, base=5)
        assert (names(lease), lease.replayed_ids) == (["new/0", "new/1"], replayed)


async def test_a_group_is_not_fresh_and_replayed_in_one_step(store: Store) -> None:
    """A withheld task that is queued again is compared with its own samples only."""
    ledger = await ledger_of(store, replay=RECENCY, staleness_policy=StalenessPolicy.WITHHOLD)
    await ledger.complete("a", version=0)
    await ledger.lead()
    assert (await ledger.attempt(1, base=5)).lease is None
    await store.runs.requeue(ledger.run_id, ["a"])
    ledger.running.clear()
    await ledger.admit()
    await ledger.finish("a", version=5)
    lease = await ledger.lease(1, base=5)
    assert lease.sample_ids == ("a/0/2#t", "a/1/2#t")
    assert lease.replayed_ids == ()
    await ledger.commit(1)
    committed = store.ledger.committed_steps
    assert await committed(ledger.run_id, ["a/0/1", "a/0/2"]) == [0, 1]


async def test_groups_without_the_reward_are_not_drawn(store: Store) -> None:
    """REWARD cannot weigh them."""
    ledger = await ledger_of(store, RULES_OF_TWO, replay=REWARD)
    await ledger.complete("a")
    await ledger.complete("b", rewards={"reward": (0.0, 1.0)})
    await ledger.complete("c", rewards={"other": (0.0, 1.0)})
    await ledger.complete("x")
    await ledger.lead()
    for step in (1, 2, 3):
        await ledger.lease(step)
    await ledger.commit(3)
    assert (await ledger.lease(4)).replayed_ids == ("b/0/1#t", "b/1/1#t")


@pytest.mark.parametrize("rules", [RECENCY, REWARD])
def test_draws_follow_their_weights(rules: Replay) -> None:
    """Over many runs each group comes first in proportion to its weight."""
    groups, step = groups_of(*"abcd"), 5
    one = replace(rules, groups_per_step=1)
    number = 20_000
    counts = Counter(draw(groups, one, f"run-{n}", step, set())[0] for n in range(number))
    weights = {
        task_id: 1 / (1 + step - group.step)
        if rules is RECENCY
        else math.exp((group.reward or 0.0) / rules.temperature)
        for task_id, group in groups.items()
    }
    for task_id, weight in weights.items():
        share = weight / sum(weights.values())
        deviation = math.sqrt(number * share * (1 - share))
        assert abs(counts[task_id] - number * share) < 4 * deviation


def test_a_draw_has_no_group_twice() -> None:
    """Without replacement, and nothing that is taken."""
    groups = groups_of(*"abcdefgh")
    for step in range(200):
        drawn = draw(groups, replace(RECENCY, groups_per_step=5), "run", step, {"a", "b"})
        assert len(drawn) == len(set(drawn) - {"a", "b"}) == 5
