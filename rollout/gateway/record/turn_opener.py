"""Batched opening of rollouts and turns."""

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
_MAX_IN_FLIGHT = 4
"""A message is answered when its slowest part is, such as a prompt that continues a long rollout:
small messages and several in flight keep the others fast."""

_Part = pb.StartRolloutRequest | pb.BeginTurnRequest


class TurnOpener:
    """Opens rollouts and turns; run `keep_sending` in the background.

    Separate from `Recorder`: tokens must not wait until long prompts are matched in the store.
    """

    def __init__(
        self, store: TrajectoryServiceAsyncStub, *, max_in_flight: int = _MAX_IN_FLIGHT
    ) -> None:
        self._store = store
        self._batcher = RequestBatcher(
            self._send, max_in_flight=max_in_flight, max_parts=_MAX_PARTS
        )
        self.keep_sending = self._batcher.keep_sending

    async def start(self, start: pb.StartRolloutRequest) -> pb.StartRolloutResponse:
        """Open a rollout. Raises `ServiceError`: the store refused it."""
        return await self._batcher.send(start)  # type: ignore[no-any-return]

    async def begin(self, begin: pb.BeginTurnRequest) -> pb.BeginTurnResponse:
        """Open a turn. Raises `ServiceError`: the store refused it."""
        return await self._batcher.send(begin)  # type: ignore[no-any-return]

    async def _send(self, parts: Sequence[_Part]) -> Sequence[Any]:
        request = pb.OpenTurnsRequest(
            starts=[part for part in parts if isinstance(part, pb.StartRolloutRequest)],
            begins=[part for part in parts if isinstance(part, pb.BeginTurnRequest)],
        )
        try:
            response = await self._store.OpenTurns(request)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:  # a manager of the previous release
                return await asyncio.gather(*map(self._alone, parts))
            # Each part is retried separately, if its agent is still connected: one that has gone
            # may have begun the turn again elsewhere.
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
