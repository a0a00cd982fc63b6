"""The six ways to use the same nodes. They differ in tags and settings, not in code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Nodes by their capability tags."""

    rollout: int
    """Nodes that only roll out."""
    train: int
    """Nodes that only train."""
    both: int
    """Nodes that do both."""

    @property
    def nodes(self) -> int:
        """All of them."""
        return self.rollout + self.train + self.both

    @property
    def gang(self) -> int:
        """Nodes of the training gang."""
        return self.train + self.both


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A way to run."""

    name: str
    kind: Literal["colocated", "disaggregated", "multiplexed"]
    """Which splits of the nodes it may have."""
    admission: Literal["published", "leased"]
    """Batches that may be generated ahead count from the newest published step, or leased one."""
    ahead: int | None
    """Batches generated ahead of that; None: as many as the workload's bound on staleness."""
    parts: int = 1
    """Training begins when this part of a batch is complete, and goes on part by part."""
    barrier: bool = False
    """New weights wait until all generation has ended."""


MODES = {
    mode.name: mode
    for mode in (
        Mode(name="colocated-sync", kind="colocated", admission="published", ahead=0),
        Mode(name="disaggregated-sync", kind="disaggregated", admission="published", ahead=0),
        Mode(
            name="one-step-async",
            kind="disaggregated",
            admission="published",
            ahead=1,
            barrier=True,
        ),
        Mode(
            name="micro-batch pipeline",
            kind="disaggregated",
            admission="published",
            ahead=0,
            parts=8,
        ),
        Mode(
            name="streamrl-async",
            kind="disaggregated",
            admission="leased",
            ahead=1,
            parts=8,
        ),
        Mode(name="multiplexed", kind="multiplexed", admission="leased", ahead=None),
    )
}
