"""Deletion of runs: only of ended ones, and nothing is left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from services.chassis.errors import Reason
from services.lib.token_bytes import pack_logprobs
from tests.lib.trajectory_manager.support import RULES, Run, other_run, refused
from trajectory_manager.model.records import Durability, ReplayStrategy
from trajectory_manager.model.runs import Replay
from trajectory_manager.store.redis.connect import Store, redis_store

REPLAY = Replay(strategy=ReplayStrategy.RECENCY, capacity_groups=4, groups_per_step=1)


async def used_run(store: Store) -> Run:
    """A run with a trained group, columns, a running rollout, an expired lease and a letter."""
    rules = {"required_columns": ("value",), "replay": REPLAY, "max_staleness": 9}
    run = await other_run(store, **rules)
    await run.submit("a", "b", "c")
    await run.play()
    await run.play()
    lease = await store.columns.lease(run.run_id, "value", (), 8, "nonce")
    assert lease is not None
    values = dict.fromkeys(lease.sample_ids, pack_logprobs([1.0]))
    await store.columns.put(run.run_id, "value", lease.epoch, values, new=True)
    await store.columns.complete(run.run_id, "value", lease.epoch, lease.sample_ids)
    epoch = (await store.ledger.reconcile(run.run_id, 0, "trainer")).epoch
    assert (await store.ledger.lease_samples(run.run_id, epoch, 1, 0, 0)).lease is not None
    await store.ledger.commit(run.run_id, epoch, 1)
    running = await run.lease()
    assert running is not None
    await run.start(running.rollout_id, running.nonce)
    await run.turn(running.rollout_id, "t1", [1], [2])
    # Never started: its record exists, and the run does not list it.
    never = await run.lease()
    assert never is not None
    await run.close(never.rollout_id, credential=None)  # type: ignore[arg-type]
    await run.start("free")
    return run


async def test_a_running_run_is_not_deleted(run: Run) -> None:
    """It names the cure; an unknown one does not exist."""
    error = await refused(Reason.WRONG_STATE, run.store.runs.delete_run(run.run_id))
    assert "EndRun" in error.message
    assert run.run_id in await run.store.runs.run_ids()
    await refused(Reason.NOT_FOUND, run.store.runs.delete_run("nowhere"))


async def test_a_deleted_run_can_be_created_anew(store: Store) -> None:
    """Nothing of the old one is there, whatever its rules were."""
    run = await used_run(store)
    await store.runs.end_run(run.run_id)
    assert await store.runs.delete_run(run.run_id) == 5
    assert run.run_id not in await store.runs.run_ids()
    await refused(Reason.NOT_FOUND, store.runs.run_counts(run.run_id))
    await refused(Reason.NOT_FOUND, store.runs.delete_run(run.run_id))
    assert await store.runs.create_run(run.run_id, replace(RULES, group_size=1)) is None
    assert (await store.runs.config(run.run_id)).group_size == 1
    assert (await store.runs.run(run.run_id)).committed_step == 0
    assert await store.runs.listed(run.run_id, 0, 10) == []
    assert await store.tokens.read(run.run_id, ["a/0/1", "free"]) == [None, None]


async def test_deletion_leaves_no_key(redis_url: str) -> None:
    """Of this run; another one, whose name begins with it, stays."""
    async with redis_store(redis_url, Durability.FAST, 5.0) as store:
        run = await used_run(store)
        other = Run(store, f"{run.run_id}.other")
        await store.runs.create_run(other.run_id, RULES)
        await other.start("free")
        redis = Redis.from_url(redis_url)
        assert len(await keys_of(redis, run.run_id)) > 20
        await store.runs.end_run(run.run_id)
        await store.runs.delete_run(run.run_id)
        assert await keys_of(redis, run.run_id) == []
        assert await keys_of(redis, other.run_id)
        assert await store.tokens.rollout(other.run_id, "free") is not None
        await redis.aclose()


async def keys_of(redis: Redis, run_id: str) -> list[bytes]:
    """All keys that belong to a run."""
    found = [key async for key in redis.scan_iter(f"sf:{{{run_id}*", 1000)]
    own = (f"sf:{{{run_id}}}".encode(), f"sf:{{{run_id}:".encode())
    return [key for key in found if key.startswith(own)]


@pytest.mark.parametrize("interrupted_by", ["unregister_run", "end_deletion"])
async def test_an_interrupted_deletion_is_continued(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, interrupted_by: str
) -> None:
    """Until then the run does not exist, and cannot be created."""
    async with redis_store(redis_url, Durability.FAST, 5.0) as store:
        run = await used_run(store)
        await store.runs.end_run(run.run_id)
        scripts: Any = store.runs._scripts
        call = scripts.call

        async def dying(name: str, **rest: object) -> object:
            if name == interrupted_by:
                raise KeyboardInterrupt
            return await call(name, **rest)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(scripts, "call", dying)
            await store.runs.delete_run(run.run_id)
        await refused(Reason.NOT_FOUND, store.runs.run_counts(run.run_id))
        await refused(Reason.WRONG_STATE, store.runs.create_run(run.run_id, RULES))
        await store.runs.delete_run(run.run_id)
        redis = Redis.from_url(redis_url)
        assert await keys_of(redis, run.run_id) == []
        await redis.aclose()
        assert await store.runs.create_run(run.run_id, RULES) is None
