"""How full a step's batch is, and when a partial batch is enough."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """How many groups of a batch are complete."""

    num_ready: int
    """Complete groups that the trainer may lease."""
    needed: int
    """Groups of a full batch."""
    stream: int = 0
    """Groups after which a streamed step starts; 0: only a full batch starts it."""

    @property
    def start(self) -> int:
        """Groups after which training starts."""
        return min(self.stream or self.needed, self.needed)

    @property
    def full(self) -> bool:
        return self.num_ready >= self.needed


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTimeout:
    """The time from which a partial batch is enough.

    SeamlessFlow (arXiv 2508.11553) interrupts rollout by batch size or by timeout.
    """

    time: float = math.inf
    """Seconds on the caller's monotonic clock; inf: never."""
    min_groups: int = 1
    """Complete groups that a partial batch must have."""

    def allows_start(self, now: float, progress: BatchProgress) -> bool:
        """Whether training can start: enough groups are ready, or the timeout is over."""
        enough = progress.num_ready >= progress.start
        return enough or (now >= self.time and progress.num_ready >= self.min_groups)

    def start_time(self, progress: BatchProgress) -> float:
        """When training can start even if no further group completes; inf: never."""
        return self.time if progress.num_ready >= self.min_groups else math.inf
