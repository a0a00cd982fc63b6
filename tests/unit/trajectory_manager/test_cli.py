"""The sweeps over all runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from tests.lib.trajectory_manager.memory.store import memory_store
from tests.lib.trajectory_manager.support import RULES, Run
from trajectory_manager.model.records import FailureClass, Purpose, Rollout, RolloutState
from trajectory_manager.service.sweeper import Sweeper


class Listing:
    """Runs among which one was listed by a process that was killed before it created it.

    And one whose record is damaged.
    """

    def __init__(self, runs: Any) -> None:
        self._runs = runs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runs, name)

    async def run_ids(self) -> list[str]:
        """Those that cannot be swept first."""
        return ["half-made", "damaged", *await self._runs.run_ids()]

    async def expired(self, run_id: str, limit: int) -> Any:
        """What the store itself raises for a key of the wrong type is no ServiceError."""
        if run_id == "damaged":
            raise RuntimeError("WRONGTYPE")
        return await self._runs.expired(run_id, limit)


async def test_one_run_does_not_keep_the_others_from_being_swept() -> None:
    """A run that cannot be swept is passed over, and the next one's expired leases are found."""
    now = [0.0]
    store = memory_store(lambda: now[0], 1)
    await store.runs.create_run("whole", RULES)
    listing: Any = Listing(store.runs)
    run = Run(replace(store, runs=listing), "whole")
    await run.submit("a")
    lease = await run.lease()
    assert lease is not None
    await run.start(lease.rollout_id, lease.nonce)
    now[0] = RULES.lease_seconds + 1
    await Sweeper(run.store, run.rollouts).sweep()
    rollout = await store.tokens.rollout("whole", lease.rollout_id)
    assert rollout is not None
    assert rollout.state is RolloutState.FAILED


class Counting:
    """Runs that count how often each is swept."""

    def __init__(self, runs: Any) -> None:
        self._runs = runs
        self.num_sweeps: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runs, name)

    async def expired(self, run_id: str, limit: int) -> Any:
        """Every sweep asks for it."""
        self.num_sweeps[run_id] += 1
        return await self._runs.expired(run_id, limit)


async def test_runs_in_which_nothing_happens_are_swept_rarely() -> None:
    """A run with a lease every time, and an idle one as soon as something happens in it."""
    store = memory_store(lambda: 0.0, 1)
    counting = Counting(store.runs)
    runs: Any = counting
    run = Run(replace(store, runs=runs), "busy")
    for name in ("idle", "busy"):
        await store.runs.create_run(name, RULES)
    await run.submit("a")
    assert await run.lease() is not None
    sweeper = Sweeper(run.store, run.rollouts)
    for _ in range(64):
        await sweeper.sweep()
    assert counting.num_sweeps["busy"] == 64
    assert counting.num_sweeps["idle"] == 8  # 1, 2, 3, 5, 9, 17, 33, 49
    await run.rollouts.start(unleased("idle", "r"), None)
    await sweeper.sweep()
    assert counting.num_sweeps["idle"] == 9


def unleased(run_id: str, rollout_id: str) -> Rollout:
    """An evaluation that an agent has started."""
    return Rollout(
        run_id=run_id, rollout_id=rollout_id, purpose=Purpose.EVAL, credential_digest="c"
    )


async def state_after(seconds: float, limit: float) -> tuple[RolloutState, FailureClass]:
    """Of a rollout without a lease that nobody finishes."""
    now = [0.0]
    store = memory_store(lambda: now[0], 1)
    await store.runs.create_run("run", RULES)
    run = Run(store, "run")
    await run.rollouts.start(unleased("run", "r"), None)
    sweeper = Sweeper(store, run.rollouts, limit, lambda: now[0])
    await sweeper.sweep()
    now[0] = seconds
    for _ in range(20):
        await sweeper.sweep()
    rollout = await store.tokens.rollout("run", "r")
    assert rollout is not None
    return rollout.state, rollout.outcome.failure_class


async def test_a_rollout_without_a_lease_that_nobody_finishes_fails() -> None:
    """After its time, and not before."""
    assert await state_after(101, 100) == (RolloutState.FAILED, FailureClass.TIMEOUT)
    assert await state_after(99, 100) == (RolloutState.RUNNING, FailureClass.NONE)


async def test_without_a_limit_it_runs_for_ever() -> None:
    """Negative control."""
    assert await state_after(1e9, 0) == (RolloutState.RUNNING, FailureClass.NONE)
