"""Batched opening of rollouts and turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from seamflow.errors import decode, from_status
from seamflow.rollout.v1 import rollout_service_pb2 as rollout_pb
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from rollout.gateway.credentials import digest
from rollout.gateway.record.request_batcher import RequestBatcher

if TYPE_CHECKING:
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

    from rollout.gateway.prompt.prompt import Prompt

_MAX_PARTS = 64
_MAX_IN_FLIGHT = 4
"""A message is answered when its slowest part is, such as a prompt that continues a long rollout:
small messages and several in flight keep the others fast."""

_Part = pb.NewRollout | pb.NewTurn


def begin_request(
    request: rollout_pb.GenerateRequest, credential: str, prompt: Prompt, attempt_id: str
) -> pb.NewTurn:
    """Opens the turn, or takes it over from another attempt under the next epoch."""
    begin = pb.NewTurn(
        run_id=request.run_id,
        rollout_id=request.rollout_id,
        turn_id=request.turn_id,
        attempt_id=attempt_id,
        parent_turn_id=request.parent_turn_id,
        template_fingerprint=prompt.fingerprint,
        sampling=request.sampling,
        credential_digest=digest(credential),
    )
    if prompt.message_keys:
        begin.message_keys.keys.extend(prompt.message_keys)
    else:
        begin.token_ids = prompt.packed_ids
    return begin


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

    async def start(self, new: pb.NewRollout) -> pb.StartedRollout:
        """Open a rollout. Raises `ServiceError`: the store refused it."""
        result: pb.NewRolloutResult = await self._batcher.send(new)
        return result.started

    async def begin(self, new: pb.NewTurn) -> pb.BegunTurn:
        """Open a turn. Raises `ServiceError`: the store refused it."""
        result: pb.NewTurnResult = await self._batcher.send(new)
        return result.begun

    async def _send(self, parts: Sequence[_Part]) -> Sequence[Any]:
        request = pb.BeginTurnsRequest(
            rollouts=[part for part in parts if isinstance(part, pb.NewRollout)],
            turns=[part for part in parts if isinstance(part, pb.NewTurn)],
        )
        try:
            response = await self._store.BeginTurns(request)
        except grpc.aio.AioRpcError as error:
            # Each part is retried separately, if its agent is still connected: one that has gone
            # may have begun the turn again elsewhere.
            return [decode(error)] * len(parts)
        rollouts, turns = iter(response.rollouts), iter(response.turns)
        results: list[pb.NewRolloutResult | pb.NewTurnResult] = [
            next(rollouts) if isinstance(part, pb.NewRollout) else next(turns) for part in parts
        ]
        return [from_status(r.error) if r.HasField("error") else r for r in results]
