"""Limits and times of an HTTP gateway that have one sensible value."""

from __future__ import annotations

KEEP_ALIVE_SECONDS = 10.0
"""Time between two signs of life on a call that is open for longer than `hold_seconds`."""
IDLE_LEASE_SECONDS = 60.0
"""How long the lease of a rollout is kept alive after its last call; an agent that is silent
for longer calls extend."""
MAX_CALLS_PER_ROLLOUT = 64
"""Calls of one rollout in progress; further ones are refused with status 429."""
MAX_INFLIGHT_BYTES = 512 << 20
"""Sum of the bodies of calls in progress, of which a rollout may use an eighth; further calls
are refused with status 429."""
BODY_TIMEOUT_SECONDS = 30.0
"""Longest time in which a client sends the body of a request."""
MAX_OPEN_CALLS = 4096
"""Calls in progress; further ones are refused with status 429."""
