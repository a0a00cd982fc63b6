"""Negative controls: without its protection a store does what it must never do."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from services.chassis.errors import Reason, ServiceError
from tests.integration.trajectory_manager.ledger import ledger_of
from tests.lib.trajectory_manager.support import RULES, failed, other_run
from trajectory_manager.model.records import Durability, Purpose, Task, TaskLease
from trajectory_manager.store.redis.connect import SCRIPTS, Store, redis_store


async def a_stale_trainer_commits(store: Store) -> bool:
    """The first of two trainers commits after the second took over."""
    ledger = await ledger_of(store)
    await ledger.complete("a")
    stale = await ledger.lead("one")
    await ledger.lease(1)
    await ledger.lead("two")
    ledger.epoch = stale
    try:
        await ledger.commit(1)
    except ServiceError as error:
        assert error.reason is Reason.STALE_EPOCH
        return False
    return True


async def a_sample_is_in_two_steps(store: Store) -> bool:
    """Two steps, both committed, share a sample."""
    ledger = await ledger_of(store, max_staleness=3)
    await ledger.complete("a", "b")
    await ledger.lead()
    first, second = await ledger.lease(1), await ledger.lease(2)
    return bool(set(first.sample_ids) & set(second.sample_ids))


async def a_committed_sample_is_leased_again(store: Store) -> bool:
    """A restore to a step before the commit brings it back."""
    ledger = await ledger_of(store)
    await ledger.complete("a", "b")
    await ledger.lead()
    first = await ledger.lease(1)
    await ledger.commit(1)
    await ledger.lead("two", step=0)
    return (await ledger.lease(1)).sample_ids == first.sample_ids


async def a_group_beyond_the_bound_is_leased(store: Store) -> bool:
    """Its oldest token is two versions older than the run allows."""
    ledger = await ledger_of(store)
    await ledger.complete("a", version=0)
    await ledger.lead()
    return (await ledger.attempt(1, base=3)).lease is not None


async def a_poisonous_step_stays(store: Store) -> bool:
    """It is delivered more often than the run allows."""
    ledger = await ledger_of(store, max_deliveries=1)
    await ledger.complete("a")
    await ledger.lead("one")
    await ledger.lease(1)
    await ledger.lead("two")
    return ledger.pending == (1,)


async def the_window_lets_a_later_group_pass(store: Store) -> bool:
    """A group that was admitted far behind the head overtakes it."""
    rules = replace(RULES, group_size=1, max_staleness=9, fifo_window=2)
    ledger = await ledger_of(store, rules)
    await ledger.admit("a", "b", "c")
    await ledger.finish("c")
    await ledger.lead()
    return (await ledger.attempt(1)).lease is not None


async def a_group_begins_that_will_be_too_old(store: Store) -> bool:
    """While the only step before it is trained, with the weights that the step began with."""
    ledger = await ledger_of(store, groups_per_step=1, max_staleness=0)
    await ledger.complete("a")
    await ledger.lead()
    await ledger.awaits(1)
    await ledger.lease(1)
    await ledger.admit("b")
    await ledger.finish(*ledger.running.keys() - {"a"})
    return (await ledger.attempt(2, base=1)).num_too_old > 0


async def a_group_may_begin_with_weights_that_are_too_old(store: Store) -> bool:
    """Those of before, when the next step's are about to be published."""
    ledger = await ledger_of(store, groups_per_step=1, max_staleness=0)
    await ledger.complete("a")
    await ledger.lead()
    await ledger.lease(1)
    await ledger.awaits(2, base=1)
    await ledger.admit("b")
    (rollout_id, *_) = ledger.running["b"]
    leased = await store.runs.register_rollout(ledger.run_id, rollout_id, ledger.nonces[rollout_id])
    assert leased is not None
    return leased.required_weight_version < 1


async def a_part_frees_more_than_it_takes(store: Store) -> bool:
    """Admission lets more groups in than the trainer has room for."""
    ledger = await ledger_of(store, groups_per_step=2)
    await ledger.complete("a")
    await ledger.lead()
    await ledger.lease_part(1)
    await ledger.admit(*"bcdefg")
    return len(ledger.running) > 1 + 2 * (RULES.max_staleness + 1)


async def a_part_is_less_than_asked_for(store: Store) -> bool:
    """One group is a step for a trainer that wants two at least."""
    ledger = await ledger_of(store, groups_per_step=3)
    await ledger.complete("a")
    await ledger.lead()
    return (await ledger.attempt(1, min_groups=2)).lease is not None


async def an_open_step_is_committed(store: Store) -> bool:
    """Though the groups it still takes would never be trained."""
    ledger = await ledger_of(store, groups_per_step=2)
    await ledger.complete("a")
    await ledger.lead()
    await ledger.stream(1)
    try:
        await ledger.commit(1)
    except ServiceError as error:
        assert error.reason is Reason.STEP_OUT_OF_ORDER
        return False
    return True


async def an_open_step_is_passed(store: Store) -> bool:
    """The next step takes groups that the open one waits for."""
    ledger = await ledger_of(store, groups_per_step=2, max_staleness=3)
    await ledger.complete("a")
    await ledger.lead()
    await ledger.stream(1)
    await ledger.complete("b", "c")
    try:
        return (await ledger.attempt(2)).lease is not None
    except ServiceError as error:
        assert error.reason is Reason.STEP_OUT_OF_ORDER
        return False


async def an_open_step_lets_others_in(store: Store) -> bool:
    """They would sample with weights that are one version older than they need be."""
    ledger = await ledger_of(store, groups_per_step=2, max_staleness=0)
    await ledger.complete("a")
    await ledger.lead()
    await ledger.stream(1)
    await ledger.admit("b", "c")
    return len(ledger.running) > 2


async def the_window_moves_within_an_open_step(store: Store) -> bool:
    """A group admitted behind the batch takes the place of one in it."""
    rules = replace(RULES, group_size=1, groups_per_step=2, max_staleness=9, fifo_window=2)
    ledger = await ledger_of(store, rules)
    await ledger.admit("a", "b", "c")
    await ledger.finish("b", "c")
    await ledger.lead()
    await ledger.stream(1)
    return len((await ledger.stream(1)).sample_ids) == 2


async def a_repeated_call_leases_twice(store: Store) -> bool:
    """The answer was lost, and the agent asks again."""
    run = await other_run(store)
    await run.submit("a")
    return await run.ask("nonce") != await run.ask("nonce")


async def an_own_slot_is_given_to_others(store: Store) -> bool:
    """A failed sample of an agent's own task is leased from the queue."""
    run = await other_run(store)
    task = Task(task_id="mine", payload_json="{}", num_samples=1, purpose=Purpose.TRAIN, own=True)
    lease = await store.runs.lease_own_task(run.run_id, task, "nonce")
    assert isinstance(lease, TaskLease)
    await run.start(lease.rollout_id, lease.nonce)
    await run.finish(lease.rollout_id, failed())
    return isinstance(await run.ask(), TaskLease)


async def a_running_run_is_deleted(store: Store) -> bool:
    """Its agents still work."""
    run = await other_run(store)
    try:
        await store.runs.delete_run(run.run_id)
    except ServiceError as error:
        assert error.reason is Reason.WRONG_STATE
        return False
    return True


async def a_turn_changes_its_sampling(store: Store) -> bool:
    """A repeated turn goes on at another temperature."""
    run = await other_run(store)
    await run.start("r")
    await run.begin("r", "t", [1])
    try:
        await run.begin("r", "t", [1], sampling='{"temperature":0.5}')
    except ServiceError as error:
        assert error.reason is Reason.ALREADY_EXISTS
        return False
    return True


CONTROLS = [
    (a_stale_trainer_commits, "commit_step", "not takes_over and epoch ~= current", "false"),
    (a_sample_is_in_two_steps, "lease_step", "redis.call('LREM', ready, 1, task_id)", ""),
    (
        a_committed_sample_is_leased_again,
        "commit_step",
        "redis.call('HDEL', groups, task_id)",
        "redis.call('LPUSH', ready, task_id)",
    ),
    (
        a_group_beyond_the_bound_is_leased,
        "_stale_groups",
        "base - group.min_version > rules.max_staleness",
        "false",
    ),
    (a_poisonous_step_stays, "commit_step", "is_new and limit > 0", "false"),
    (
        the_window_lets_a_later_group_pass,
        "lease_step",
        "inside[task_id] and not taken[task_id]",
        "not taken[task_id]",
    ),
    (
        a_part_frees_more_than_it_takes,
        "lease_step",
        "'leased_groups', number",
        "'leased_groups', num_groups",
    ),
    (a_part_is_less_than_asked_for, "lease_step", "number >= min_groups", "number > 0"),
    (
        the_window_moves_within_an_open_step,
        "lease_step",
        "window - #entry.groups",
        "window",
    ),
    (an_open_step_is_committed, "commit_step", "last and cjson.decode(last).open", "false"),
    (an_open_step_is_passed, "lease_step", "last and cjson.decode(last).open", "false"),
    (a_group_begins_that_will_be_too_old, "lease_step", "'training', 1", "'training', 0"),
    (
        a_group_may_begin_with_weights_that_are_too_old,
        "_task_leases",
        "group.required_version = version",
        "group.required_version = 0",
    ),
    (an_open_step_lets_others_in, "lease_step", "'open_groups', #fresh", "'leased_groups', #fresh"),
    (a_repeated_call_leases_twice, "lease_task", "if held then return held end", ""),
    (an_own_slot_is_given_to_others, "_replacements", "if not group.own then", "if true then"),
    (a_running_run_is_deleted, "begin_deletion", "if not marks[1] then", "if false then"),
    (
        a_turn_changes_its_sampling,
        "begin_turn",
        "if known.sampling ~= given.sampling then",
        "if false then",
    ),
]


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control[0].__name__)
async def test_each_protection_is_necessary(
    redis_url: str, tmp_path: Path, control: tuple[object, str, str, str]
) -> None:
    """It does not happen with the scripts as they are, and does without the one condition."""
    happens, script, protection, without = control
    assert callable(happens)
    async with redis_store(redis_url, Durability.FAST, 5.0) as store:
        assert not await happens(store)
    folder = tmp_path / "lua"
    shutil.copytree(SCRIPTS, folder)
    source = (folder / f"{script}.lua").read_text()
    assert protection in source
    (folder / f"{script}.lua").write_text(source.replace(protection, without))
    async with redis_store(redis_url, Durability.FAST, 5.0, folder) as store:
        assert await happens(store)
