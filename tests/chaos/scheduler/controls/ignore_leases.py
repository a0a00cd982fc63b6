"""A scheduler that does not wait for leases to run out.

A negative control: it reassigns work before the lease of the node agents expires.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler import cli
from scheduler.pool.node_leases import NodeLeases

_PART = 0.6


class HastyLeases(NodeLeases):
    """Shorter, margin included, than the lease of node agents."""

    def __init__(self, seconds: float, margin: float, clock: Callable[[], float]) -> None:
        super().__init__(_PART * seconds - margin, margin, clock)


if __name__ == "__main__":
    # The process has no setting for this on purpose.
    vars(cli)["Leases"] = HastyLeases
    cli.main()
