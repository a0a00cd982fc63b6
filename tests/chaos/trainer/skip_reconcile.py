"""`python -m tests.chaos.trainer.skip_reconcile`: a trainer that reads its data anew at each start.

A negative control: it commits its steps like any other, but what it trains on it takes from the
recording by itself, from the beginning on.
"""

from __future__ import annotations

import grpc.aio
from seamflow.trajectory.v1 import sample_service_pb2

from tests.chaos.trainer.samples import GROUP_SIZE, GROUPS_PER_STEP
from trainer import cli
from trainer.clients.sample_client import SampleClient

_STEP_SAMPLES = GROUP_SIZE * GROUPS_PER_STEP
_ALL = 1000


class RereadingSampleClient(SampleClient):
    """Keeps no account of what was trained before its start."""

    def __init__(self, channel: grpc.aio.Channel, run_id: str) -> None:
        super().__init__(channel, run_id)
        self._listing = sample_service_pb2.ListSamplesRequest(run_id=run_id, page_size=_ALL)
        self._read = 0

    async def lease(
        self, step: int, base_weight_version: int, min_groups: int = 0
    ) -> sample_service_pb2.LeaseSamplesResponse | None:
        """See `SampleClient.lease`; other samples."""
        leased = await super().lease(step, base_weight_version, min_groups)
        if leased is not None:
            listed = (await self._stub.ListSamples(self._listing)).samples
            first, self._read = self._read, self._read + _STEP_SAMPLES
            del leased.samples[:]
            leased.samples.extend(entry.sample for entry in listed[first : self._read])
        return leased


if __name__ == "__main__":
    # The process has no setting for this on purpose.
    vars(cli)["SampleClient"] = RereadingSampleClient
    cli.main()
