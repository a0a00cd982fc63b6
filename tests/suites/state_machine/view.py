"""All that a caller can see of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from tests.suites.state_machine.store_pair import comparable
from trajectory_manager.store.redis.connect import Store

_ALL = 10_000


async def view(
    store: Store, run_id: str, rollout_ids: Collection[str], epoch: int, leased: Collection[int]
) -> dict[str, Any]:
    """What `store` shows of a run; `leased` has the steps that `epoch` was given."""
    names = sorted(rollout_ids)
    status = await store.columns.status(run_id, "", _ALL)
    # Before all else is read: an open step takes what is ready when it is leased again.
    leases = {
        f"step {step}": await store.ledger.lease_samples(
            # An open one stays open: what is asked for must not end what rules go on with.
            run_id,
            epoch,
            step,
            0,
            0,
            streaming=True,
        )
        for step in leased
    }
    found = {
        "rollouts": store.tokens.read(run_id, names),
        "spans": store.tokens.read(run_id, names, spans_only=True),
        "run_counts": store.runs.run_counts(run_id),
        "listed": store.runs.listed(run_id, 0, _ALL),
        "unsettled": store.runs.unsettled(run_id, _ALL),
        "expired": store.runs.expired(run_id, _ALL),
        "dead letters": store.runs.dead_letters(run_id, 0, _ALL),
        "newest dead letters": store.runs.dead_letters(run_id, 0, 3, newest_first=True),
        "index": store.inspection.newest(run_id, 0, _ALL),
        "second page of the index": store.inspection.newest(run_id, 5, 2),
        "rows": store.inspection.rows(run_id, names),
        "recorded steps": store.inspection.trained_steps(run_id),
        "committed steps": store.ledger.committed_steps(run_id, names),
        **{
            f"backlog of {column}": store.columns.backlog(run_id, column)
            for column in ("critic", "reference")
        },
        "values": store.columns.read(run_id, [row.sample_id for row in status]),
        "needed": store.retention.needed(run_id, names),
        "due": store.retention.due(run_id, _ALL),
        **{
            f"rollouts of group {group}": store.inspection.of_group(run_id, group)
            for group in sorted({name.split("/")[0] for name in names})
        },
        **{
            f"rollouts of step {step}": store.inspection.of_step(run_id, step)
            for step in range(1, max(leased, default=0) + 2)
        },
    }
    answers = await asyncio.gather(*found.values())
    shown = {
        name: comparable(answer)
        for name, answer in zip((*leases, *found), (*leases.values(), *answers), strict=True)
    }
    return {**shown, "columns": comparable(status)}
