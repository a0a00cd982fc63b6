"""A store in this process's memory."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.lib.trajectory_manager.memory.column_store import MemoryColumnStore
from tests.lib.trajectory_manager.memory.inspection_store import MemoryInspectionStore
from tests.lib.trajectory_manager.memory.ledger_store import MemoryLedgerStore
from tests.lib.trajectory_manager.memory.retention_store import MemoryRetentionStore
from tests.lib.trajectory_manager.memory.run_state import Runs
from tests.lib.trajectory_manager.memory.run_store import MemoryRunStore
from tests.lib.trajectory_manager.memory.token_store import MemoryTokenStore
from trajectory_manager.model.records import Durability
from trajectory_manager.store.redis.connect import Store


def memory_store(clock: Callable[[], float] = time.time, incarnation: int | None = None) -> Store:
    """A fresh store; `clock` gives Unix seconds, `incarnation` (default: now) marks this start."""
    runs = Runs()
    start = int(clock()) if incarnation is None else incarnation
    tokens = MemoryTokenStore(clock, start)
    columns = MemoryColumnStore(runs, tokens, clock)
    return Store(
        tokens=tokens,
        runs=MemoryRunStore(runs, tokens, columns, clock),
        ledger=MemoryLedgerStore(runs, clock),
        columns=columns,
        retention=MemoryRetentionStore(runs, tokens, columns),
        inspection=MemoryInspectionStore(runs),
        durability=Durability.FAST,
        ready=_always,
    )


async def _always() -> bool:
    return True
