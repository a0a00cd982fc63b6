"""A gateway with record-before-forward switched off: the negative control of the kill test.

`Turn` forwards tokens when `Recorder.record` returns, so this gateway's recorder returns
immediately and records half a second later, like a system whose store is an asynchronous log.
"""

from __future__ import annotations

import asyncio

from seamflow.trajectory.v1 import trajectory_service_pb2 as store_pb

from rollout.gateway import cli
from rollout.gateway.record.recorder import Recorder

_DELAY_SECONDS = 0.5


class ForwardFirst(Recorder):
    """Records in the background, in order, too late."""

    _last: asyncio.Task[None] | None = None

    async def record(self, append: store_pb.TokenAppend) -> int:
        """Return before anything is stored."""
        self._last = asyncio.create_task(self._record_later(self._last, append))
        return 0

    async def _record_later(
        self, before: asyncio.Task[None] | None, append: store_pb.TokenAppend
    ) -> None:
        if before is not None:
            await before
        else:
            await asyncio.sleep(_DELAY_SECONDS)
        await super().record(append)


if __name__ == "__main__":
    cli.Recorder = ForwardFirst  # type: ignore[attr-defined]  # what `main` imported
    cli.main()
