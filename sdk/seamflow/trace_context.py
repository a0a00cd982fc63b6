"""W3C trace context: the `traceparent` that calls carry from process to process.

All that happens to a rollout belongs to one trace, whose ids follow from the rollout's name:
agents, gateways and trainers know them without asking each other.
"""

from __future__ import annotations

import hashlib
import re
from contextvars import ContextVar

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")

HEADER = "traceparent"
"""Key in the metadata of a call."""

current: ContextVar[str | None] = ContextVar("seamflow_traceparent", default=None)
"""Sent with every call made in this context; an agent that traces its own work sets it."""


def ids(traceparent: str) -> tuple[str, ...]:
    """Trace id (32 hexadecimal digits) and span id (16); empty if it is not a traceparent."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return found.groups() if found else ()


def of_rollout(run_id: str, rollout_id: str) -> str:
    """The 55 characters of the span that a rollout begins with, the root of its trace."""
    digest = hashlib.sha256(f"{run_id}\0{rollout_id}".encode()).hexdigest()
    return f"00-{digest[:32]}-{digest[32:48]}-01"
