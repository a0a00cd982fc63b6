"""Opening for many agents at once: rollouts, and their turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from seamflow.errors import decode, from_status
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from rollout.gateway.record.request_batcher import RequestBatcher

if TYPE_CHECKING:
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

__all__ = ["TurnOpener"]

_MAX_PARTS = 64
_MAX_UNDER_WAY = 4
"""A message is answered with its slowest part, such as a prompt that continues a long rollout: few
parts wait for it, and other messages do not."""

_Part = pb.StartRolloutRequest | pb.BeginTurnRequest


class TurnOpener:
    """Opens rollouts and turns; `keep_sending` runs as long as it is used.

    Apart from `Recorder`: tokens must not wait until long prompts are found in what is stored.
    """

    def __init__(
        self, store: TrajectoryServiceAsyncStub, *, max_under_way: int = _MAX_UNDER_WAY
    ) -> None:
        self._store = store
        self._batcher = RequestBatcher(
            self._send, max_under_way=max_under_way, max_parts=_MAX_PARTS
        )
        self.keep_sending = self._batcher.keep_sending

    async def start(self, start: pb.StartRolloutRequest) -> pb.StartRolloutResponse:
        """Open a rollout. Raises `ServiceError`: the store's refusal."""
        return await self._batcher.send(start)  # type: ignore[no-any-return]

    async def begin(self, begin: pb.BeginTurnRequest) -> pb.BeginTurnResponse:
        """Open a turn. Raises `ServiceError`: the store's refusal."""
        return await self._batcher.send(begin)  # type: ignore[no-any-return]

    async def _send(self, parts: Sequence[_Part]) -> Sequence[Any]:
        request = pb.OpenTurnsRequest(
            starts=[part for part in parts if isinstance(part, pb.StartRolloutRequest)],
            begins=[part for part in parts if isinstance(part, pb.BeginTurnRequest)],
        )
        try:
            response = await self._store.OpenTurns(request)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:  # a manager of a release before
                return await asyncio.gather(*map(self._alone, parts))
            # Each part goes again by itself, if its agent is still there: one that is gone may have
            # begun the turn anew elsewhere.
            return [decode(error)] * len(parts)
        started, begun = iter(response.starts), iter(response.begins)
        results: list[pb.StartResult | pb.BeginResult] = [
            next(started) if isinstance(part, pb.StartRolloutRequest) else next(begun)
            for part in parts
        ]
        return [from_status(r.error) if r.HasField("error") else r.response for r in results]

    async def _alone(self, part: _Part) -> Any:
        is_start = isinstance(part, pb.StartRolloutRequest)
        call: Any = self._store.StartRollout if is_start else self._store.BeginTurn
        try:
            return await call(part)
        except grpc.aio.AioRpcError as error:
            return decode(error)
