"""Opening for many agents at once: rollouts, and their turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from seamflow.errors import decode, from_status
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from rollout.gateway.record.request_batcher import Batches

if TYPE_CHECKING:
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

__all__ = ["Opener"]

_MAX_PARTS = 64
_MAX_UNDER_WAY = 4
"""A message is answered with its slowest part, such as a prompt that continues a long rollout: few
parts wait for it, and other messages do not."""

_Part = pb.NewRollout | pb.NewTurn


class Opener:
    """Opens rollouts and turns; `keep_sending` runs as long as it is used.

    Apart from `Recorder`: tokens must not wait until long prompts are found in what is stored.
    """

    def __init__(
        self, store: TrajectoryServiceAsyncStub, *, max_under_way: int = _MAX_UNDER_WAY
    ) -> None:
        self._store = store
        self._batches = Batches(self._send, max_under_way=max_under_way, max_parts=_MAX_PARTS)
        self.keep_sending = self._batches.keep_sending

    async def start(self, new: pb.NewRollout) -> pb.NewRolloutResult:
        """Open a rollout. Raises `ServiceError`: the store's refusal."""
        return await self._batches.answered(new)  # type: ignore[no-any-return]

    async def begin(self, new: pb.NewTurn) -> pb.NewTurnResult:
        """Open a turn. Raises `ServiceError`: the store's refusal."""
        return await self._batches.answered(new)  # type: ignore[no-any-return]

    async def _send(self, parts: Sequence[_Part]) -> Sequence[Any]:
        request = pb.BeginTurnsRequest(
            rollouts=[part for part in parts if isinstance(part, pb.NewRollout)],
            turns=[part for part in parts if isinstance(part, pb.NewTurn)],
        )
        try:
            response = await self._store.BeginTurns(request)
        except grpc.aio.AioRpcError as error:
            # Each part is sent again by itself, if its agent is still there: one that is gone may
            # have begun the turn again through another gateway.
            return [decode(error)] * len(parts)
        rollouts, turns = iter(response.rollouts), iter(response.turns)
        results: list[pb.NewRolloutResult | pb.NewTurnResult] = [
            next(rollouts) if isinstance(part, pb.NewRollout) else next(turns) for part in parts
        ]
        return [from_status(r.error) if r.HasField("error") else r for r in results]
