"""Limits and times of the scheduler that have one sensible value."""

from __future__ import annotations

LEASE_MARGIN_SECONDS = 2.0
"""Time after a node's lease expired until the node is lost."""
LEAVE_SECONDS = 120.0
"""Time a node granted to a gang may take to end its old work before it is left out."""
MAX_EVENTS = 100_000
"""Entries the audit log keeps."""
