"""From a rollout to its run: a kill between any two steps loses nothing and repeats nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from seamflow.common.v1 import tokens_pb2

from services.chassis.errors import Reason, ServiceError
from services.lib.token_bytes import unpack_ids
from tests.lib.redis_server import RedisServer
from tests.lib.trajectory_manager.support import RULES, Run, policy, rollout_finish, tokens
from trajectory_manager.model.records import Durability, RolloutState, TaskLease
from trajectory_manager.service.rollouts import Rollouts
from trajectory_manager.store.redis.connect import SCRIPTS, Store, redis_store


class KilledError(Exception):
    """The process ended here."""


class Stopping:
    """A half of a store, in a process that is killed when it calls `method`."""

    def __init__(self, half: Any, method: str) -> None:
        self._half = half
        self._method = method

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == self._method:
            raise KilledError
        found: Callable[..., Any] = getattr(self._half, name)
        return found


async def begun(run: Run) -> TaskLease:
    """A leased rollout with one turn, not finished."""
    lease = await run.lease()
    assert lease is not None
    await run.start(lease.rollout_id, lease.nonce)
    await run.turn(lease.rollout_id, "t1", [1, 2], [3], policy())
    return lease


@pytest.mark.parametrize("killed_at", ["add_outbox_marks", "finish", "settle"])
async def test_a_kill_while_finishing_loses_nothing(run: Run, killed_at: str) -> None:
    """The agent's retry, or the sweep where the record is finished, completes the group once."""
    await run.submit("a")
    await run.play()
    lease = await begun(run)
    tokens: Any = Stopping(run.store.tokens, killed_at)
    runs: Any = Stopping(run.store.runs, killed_at)
    dying = replace(run.store, tokens=tokens, runs=runs)
    with pytest.raises(KilledError):
        await Rollouts(dying).finish(run.run_id, [rollout_finish(lease.rollout_id)])
    assert (await run.store.runs.run_counts(run.run_id)).num_ready_groups == 0
    await run.rollouts.sweep(run.run_id)
    ready = (await run.store.runs.run_counts(run.run_id)).num_ready_groups
    assert ready == (killed_at == "settle")
    await run.finish(lease.rollout_id)
    await run.rollouts.sweep(run.run_id)
    counts = await run.store.runs.run_counts(run.run_id)
    assert (counts.num_ready_groups, counts.num_running_rollouts) == (1, 0)
    assert await run.store.runs.unsettled(run.run_id, 10) == []


async def test_an_unauthorized_finish_leaves_no_mark(run: Run) -> None:
    """Neither a wrong credential nor a made-up name gives the sweeper work for ever."""
    await run.submit("a")
    lease = await begun(run)
    for name, reason in ((lease.rollout_id, Reason.PERMISSION_DENIED), ("x/0/1", Reason.NOT_FOUND)):
        with pytest.raises(ServiceError) as caught:
            await run.finish(name, credential="0" * 64)
        assert caught.value.reason is reason
    assert await run.store.runs.unsettled(run.run_id, 10) == []


async def test_without_the_mark_a_kill_would_leave_the_group_incomplete(run: Run) -> None:
    """Negative control: finish alone, unannounced, is not found by the sweep."""
    await run.submit("a")
    await run.play()
    lease = await begun(run)
    await run.close(lease.rollout_id)
    await run.rollouts.sweep(run.run_id)
    assert (await run.store.runs.run_counts(run.run_id)).num_ready_groups == 0
    await run.rollouts.settle(run.run_id, [lease.rollout_id])
    assert (await run.store.runs.run_counts(run.run_id)).num_ready_groups == 1


async def test_a_gap_replaces_the_sample_of_a_group(run: Run) -> None:
    """The rollout fails as INFRASTRUCTURE and its slot is leased again."""
    await run.submit("a")
    lease = await begun(run)
    epoch = (await run.begin(lease.rollout_id, "t2", [1, 2, 3])).epoch
    with pytest.raises(ServiceError) as caught:
        await run.append(lease.rollout_id, "t2", epoch, 5, tokens([1]))
    assert caught.value.reason is Reason.OFFSET_GAP
    again = await run.lease()
    assert again is not None
    assert again.rollout_id == "a/0/2"


async def takeover(store: Store) -> list[int]:
    """Two gateways write one turn, the second after taking it over; what is stored then."""
    await store.runs.create_run("run", RULES)
    run = Run(store, "run")
    await run.start("r")
    old = (await run.begin("r", "t", [1], "old")).epoch
    new = (await run.begin("r", "t", [1], "new")).epoch
    await run.append("r", "t", new, 0, tokens([7]))
    with pytest.raises(ServiceError) as caught:
        await run.append("r", "t", old, 1, tokens([8], policy()))
    assert caught.value.reason is Reason.STALE_EPOCH
    (stored,) = await store.tokens.tokens("run", "r", ["t"])
    return list(stored.ids[::4])


async def test_a_stale_writer_leaves_no_trace(tmp_path: Path) -> None:
    """The script itself rejects it; without its check it stores the stale tokens."""
    server = RedisServer(tmp_path / "redis")
    server.start()
    unfenced = tmp_path / "lua"
    unfenced.mkdir()
    for path in SCRIPTS.glob("*.lua"):
        source = path.read_text()
        if path.stem == "append_tokens":
            assert source.count("if inc ~= incarnation or count ~= counter or not fresh then") == 1
            source = source.replace(
                "if inc ~= incarnation or count ~= counter or not fresh then", "if false then"
            )
        (unfenced / path.name).write_text(source)
    try:
        async with redis_store(server.url, Durability.FAST, 5.0) as store:
            assert await takeover(store) == [7]
        server.kill()
        server.start()
        async with redis_store(server.url, Durability.FAST, 5.0, unfenced) as store:
            run = Run(store, "control")
            await store.runs.create_run("control", RULES)
            await run.start("r")
            old = (await run.begin("r", "t", [1], "old")).epoch
            new = (await run.begin("r", "t", [1], "new")).epoch
            await run.append("r", "t", new, 0, tokens([7]))
            await run.append("r", "t", old, 1, tokens([8], policy()))
            (stored,) = await store.tokens.tokens("control", "r", ["t"])
            assert list(stored.ids[::4]) == [7, 8]
    finally:
        server.stop()


async def test_a_restart_of_redis_fences_every_writer(tmp_path: Path) -> None:
    """Earlier writers must begin again under a greater epoch, and find what is stored."""
    server = RedisServer(tmp_path / "redis")
    server.start(appendfsync="always")
    try:
        async with redis_store(server.url, Durability.DURABLE, 5.0) as store:
            run = Run(store, "run")
            await store.runs.create_run("run", RULES)
            await run.start("r")
            old = (await run.begin("r", "t", [1])).epoch
            await run.append("r", "t", old, 0, tokens([1]))
            server.kill()
            with pytest.raises(ServiceError) as caught:
                await run.append("r", "t", old, 1, tokens([2]))
            assert caught.value.reason is Reason.STORE_UNAVAILABLE
            server.start(appendfsync="always")
            with pytest.raises(ServiceError) as caught:
                await run.append("r", "t", old, 1, tokens([2]))
            assert caught.value.reason is Reason.STALE_EPOCH
            again = await run.begin("r", "t", [1])
            assert again.epoch > old
            assert again.tokens == tokens([1]).fill(tokens_pb2.PackedTokens())
            assert await run.append("r", "t", again.epoch, 1, tokens([2])) == 2
            rollout = await store.tokens.rollout("run", "r")
            assert rollout is not None
            assert rollout.state is RolloutState.RUNNING
    finally:
        server.stop()


class OneManager(Run):
    """A run whose calls all go through one manager process."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.store, run.run_id)
        self._rollouts = Rollouts(run.store)

    @property
    def rollouts(self) -> Rollouts:
        """Always the same."""
        return self._rollouts


async def test_the_first_turn_of_a_rollout_reads_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout that was just started has nothing to match: one step of the store."""
    manager = OneManager(run)

    async def read(*_: object) -> None:
        raise AssertionError("nothing is recorded yet")

    for name in ("newest_turn", "turns", "tokens"):
        monkeypatch.setattr(type(run.store.tokens), name, read)
    for name, prompt in (("ids", [1, 2]), ("keys", ["a", "b"])):
        await manager.start(name)
        begun = await manager.begin(name, "t", prompt)
        assert (begun.prefix_token_ids, begun.prefix_turn_id) == (b"", "")
    with pytest.raises(AssertionError, match="nothing is recorded"):  # control: the second turn
        await manager.begin("ids", "t2", [1, 2])


@pytest.mark.parametrize("repeated", [False, True])
async def test_turns_that_began_at_another_manager_are_matched(run: Run, repeated: bool) -> None:
    """The process that started the rollout does not know of them until it looks."""
    manager, other = OneManager(run), OneManager(run)
    await manager.start("r")
    await other.turn("r", "t1", [1, 2], [3])
    if repeated:
        await other.begin("r", "t2", [1, 2, 3, 4])
    begun = await manager.begin("r", "t2", [1, 2, 3, 4])
    assert begun.prefix_turn_id == "t1"
    assert unpack_ids(begun.prefix_token_ids) == [1, 2, 3]
