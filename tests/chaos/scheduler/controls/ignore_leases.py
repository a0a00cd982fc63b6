"""A scheduler that does not wait for leases to run out.

A negative control: it tells node agents one lease and gives their work away after part of it.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler import cli
from scheduler.pool.heartbeats import NodeLeases

__all__ = ["HastyLeases"]

_PART = 0.6


class HastyLeases(NodeLeases):
    """Shorter, margin and all, than what node agents are told."""

    def __init__(self, seconds: float, margin: float, clock: Callable[[], float]) -> None:
        super().__init__(_PART * seconds - margin, margin, clock)


if __name__ == "__main__":
    # The process has no setting for this on purpose.
    vars(cli)["Leases"] = HastyLeases
    cli.main()
