"""The Redis keys of the scheduler; one hash tag, so that its scripts use one slot."""

from __future__ import annotations

__all__ = ["BALANCES", "COUNTERS", "EVENTS", "GANGS", "LENDINGS", "NODES", "RUNS", "STORE"]

COUNTERS = "sf:scheduler:{pool}:counters"
"""Hash: `incarnation`, and the `last_*` counters of the state."""
NODES = "sf:scheduler:{pool}:nodes"
"""Hash: node_id -> JSON."""
GANGS = "sf:scheduler:{pool}:gangs"
"""Hash: [run_id, gang_id] as JSON -> JSON."""
RUNS = "sf:scheduler:{pool}:runs"
"""Hash: run_id -> its policy as JSON."""
LENDINGS = "sf:scheduler:{pool}:lendings"
"""Hash: [run_id, gang_id] as JSON -> its lending measurements as JSON."""
BALANCES = "sf:scheduler:{pool}:balances"
"""Hash: [run_id, gang_id] as JSON -> its stage times and advice as JSON."""
EVENTS = "sf:scheduler:{pool}:events"
"""Sorted set: JSON by sequence."""
STORE = "sf:scheduler:{pool}:store"
"""String: marks the store, to notice one that has come back empty."""
