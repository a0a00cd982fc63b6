"""Limits and times of the trajectory manager that have one sensible value."""

from __future__ import annotations

DURABILITY_CHECK_SECONDS = 5.0
"""Time between two checks of the store's settings."""
START_SECONDS = 15.0
"""How long to wait at start for a store that does not answer."""
MAX_INFLIGHT_BYTES = 32 << 20
"""Bytes of tokens that may wait for a slow store; appends beyond are refused for a while."""
SWEEP_SECONDS = 1.0
"""Time between two sweeps for expired leases and unsettled rollouts; of runs in which nothing
happens up to 16 times as long."""
UNLEASED_ROLLOUT_SECONDS = 86_400.0
"""Time after which a rollout without a lease that nobody finished fails (TIMEOUT); what is
recorded of it stays readable. 0: never."""
