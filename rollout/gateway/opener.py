"""Opening for many agents at once: rollouts, and their turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from seamflow.errors import SeamflowError, from_status
from seamflow.retry import retrying
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from rollout.gateway.batches import Batches
from rollout.gateway.peers import answered

if TYPE_CHECKING:
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

__all__ = ["Opener"]

_Part = pb.StartRolloutRequest | pb.BeginTurnRequest


class Opener:
    """Opens rollouts and turns; `keep_sending` runs as long as it is used.

    Apart from `Recorder`: tokens must not wait until long prompts are found in what is stored.
    """

    def __init__(self, store: TrajectoryServiceAsyncStub, **bounds: int) -> None:
        """`bounds` are those of `Batches`."""
        self._store = store
        self._batches = Batches(self._send, **bounds)
        self.keep_sending = self._batches.keep_sending

    async def start(self, start: pb.StartRolloutRequest) -> pb.StartRolloutResponse:
        """Open a rollout. Raises `ServiceError`: the store's refusal."""
        return await self._batches.answered(start)  # type: ignore[no-any-return]

    async def begin(self, begin: pb.BeginTurnRequest) -> pb.BeginTurnResponse:
        """Open a turn. Raises `ServiceError`: the store's refusal."""
        return await self._batches.answered(begin)  # type: ignore[no-any-return]

    async def _send(self, parts: Sequence[_Part]) -> Sequence[Any]:
        request = pb.OpenTurnsRequest(
            starts=[part for part in parts if isinstance(part, pb.StartRolloutRequest)],
            begins=[part for part in parts if isinstance(part, pb.BeginTurnRequest)],
        )
        response = await answered(lambda: self._opened(request))
        if response is None:
            return await asyncio.gather(*map(self._alone, parts))
        started, begun = iter(response.starts), iter(response.begins)
        results: list[pb.StartResult | pb.BeginResult] = [
            next(started) if isinstance(part, pb.StartRolloutRequest) else next(begun)
            for part in parts
        ]
        return [from_status(r.error) if r.HasField("error") else r.response for r in results]

    async def _opened(self, request: pb.OpenTurnsRequest) -> pb.OpenTurnsResponse | None:
        """None: the store is of a release that opens one by one."""
        try:
            return await self._store.OpenTurns(request)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            return None

    async def _alone(self, part: _Part) -> Any:
        is_start = isinstance(part, pb.StartRolloutRequest)
        call: Any = self._store.StartRollout if is_start else self._store.BeginTurn
        try:
            return await retrying(lambda: call(part))
        except SeamflowError as error:
            return error
