"""The bound on bytes of tokens in flight to the store, shared by all calls."""

from __future__ import annotations

from services.chassis.errors import Reason
from services.chassis.rpc.request_budget import RequestBudget

_RETRY_SECONDS = 0.2


def store_budget(max_inflight_bytes: int) -> RequestBudget:
    """Refuses with STORE_FULL what would exceed `max_inflight_bytes`: the store is slow."""
    return RequestBudget(max_inflight_bytes, full=Reason.STORE_FULL, retry_seconds=_RETRY_SECONDS)
