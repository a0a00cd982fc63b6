"""Every Redis key of the scheduler; one hash tag, so its scripts touch one slot."""

from __future__ import annotations

__all__ = ["COUNTERS", "EVENTS", "GANGS", "NODES"]

COUNTERS = "sf:scheduler:{pool}:counters"
"""Hash: `incarnation`, and the `last_*` counters of the state."""
NODES = "sf:scheduler:{pool}:nodes"
"""Hash: node_id -> JSON."""
GANGS = "sf:scheduler:{pool}:gangs"
"""Hash: [run_id, gang_id] as JSON -> JSON."""
EVENTS = "sf:scheduler:{pool}:events"
"""Sorted set: JSON by sequence."""
