"""`python -m tests.chaos.trainer.commit_at_lease`: a trainer that commits a step when it leases it.

A negative control: a crash before the checkpoint leaves samples consumed that no weights know.
"""

from __future__ import annotations

import asyncio

from seamflow.trajectory.v1 import sample_service_pb2

from trainer import cli
from trainer.clients.sample_client import SampleClient

_CRASH_SECONDS = 0.2
"""Time for a crash to come at the worst moment."""


class HastySampleClient(SampleClient):
    """Commits first."""

    async def lease(
        self, step: int, base_weight_version: int, min_groups: int = 0
    ) -> sample_service_pb2.LeaseSamplesResponse | None:
        """See `SampleClient.lease`."""
        leased = await super().lease(step, base_weight_version, min_groups)
        if leased is not None:
            await self.commit(step)
            await asyncio.sleep(_CRASH_SECONDS)
        return leased


if __name__ == "__main__":
    # The process has no setting for this on purpose.
    vars(cli)["SampleClient"] = HastySampleClient
    cli.main()
