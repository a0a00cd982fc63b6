"""The sweep over all runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.trajectory_manager.memory.store import memory_store
from tests.trajectory_manager.support import RULES, Run
from trajectory_manager.cli import sweep
from trajectory_manager.model.records import RolloutState
from trajectory_manager.service.metrics import Metrics


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
    run = Run(replace(store, runs=Listing(store.runs)), "whole")
    await run.submit("a")
    lease = await run.lease()
    assert lease is not None
    await run.start(lease.rollout_id, lease.nonce)
    now[0] = RULES.lease_seconds + 1
    await sweep(run.store, run.rollouts, Metrics())
    rollout = await store.tokens.rollout("whole", lease.rollout_id)
    assert rollout is not None
    assert rollout.state is RolloutState.FAILED
