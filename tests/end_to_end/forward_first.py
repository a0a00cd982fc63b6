"""A gateway with record-before-forward switched off: the negative control of the kill test.

It forwards at once and records half a second later, as a system would that treats its store as a
log to be caught up with.
"""

from __future__ import annotations

import asyncio

from seamflow.trajectory.v1 import trajectory_service_pb2 as store_pb

from rollout.gateway import servicer
from rollout.gateway.cli import main

_DELAY_SECONDS = 0.5


class ForwardFirst(servicer.GatewayServicer):
    """Records in the background, in order, too late."""

    _last: asyncio.Task[None] | None = None

    async def record(self, append: store_pb.TokenAppend) -> None:
        """Return before anything is stored."""
        self._last = asyncio.create_task(self._later(self._last, append))

    async def _later(self, before: asyncio.Task[None] | None, append: store_pb.TokenAppend) -> None:
        if before is not None:
            await before
        else:
            await asyncio.sleep(_DELAY_SECONDS)
        await super().record(append)


if __name__ == "__main__":
    import rollout.gateway.cli as cli

    cli.GatewayServicer = ForwardFirst  # type: ignore[misc]
    main()
