"""A store in this process's memory."""

from __future__ import annotations

import time
from collections.abc import Callable

from trajectory_manager.memory_columns import MemoryColumnStore
from trajectory_manager.memory_ledger import MemoryLedgerStore
from trajectory_manager.memory_retention import MemoryRetentionStore
from trajectory_manager.memory_runs import MemoryRunStore
from trajectory_manager.memory_state import Runs
from trajectory_manager.memory_tokens import MemoryTokenStore
from trajectory_manager.records import Durability
from trajectory_manager.store import Store


def memory_store(clock: Callable[[], float] = time.time, incarnation: int | None = None) -> Store:
    """A fresh store; `clock` gives Unix seconds, `incarnation` (default: now) marks this start."""
    runs = Runs()
    start = int(clock()) if incarnation is None else incarnation
    tokens = MemoryTokenStore(clock, start)
    columns = MemoryColumnStore(runs, tokens, clock)
    return Store(
        tokens=tokens,
        runs=MemoryRunStore(runs, clock),
        ledger=MemoryLedgerStore(runs, clock),
        columns=columns,
        retention=MemoryRetentionStore(runs, tokens, columns),
        durability=Durability.FAST,
        ready=_always,
    )


async def _always() -> bool:
    return True
