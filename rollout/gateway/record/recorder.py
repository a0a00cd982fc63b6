"""Batched recording: tokens, ends of turns and ends of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from seamflow.errors import SeamflowError, from_status
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from rollout.gateway.record.request_batcher import RequestBatcher
from services.chassis import metrics
from services.chassis.rpc.clients import call_until_answered

if TYPE_CHECKING:
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

_MESSAGES = metrics.counter(
    "rollout_gateway", "record_messages_total", "Messages of appends sent to the store."
)
_APPENDS = metrics.counter(
    "rollout_gateway", "recorded_appends_total", "Appends that the store acknowledged."
)

_Part = pb.TokenAppend | pb.RolloutFinish
_Answer = pb.TokenAppendResult | pb.RolloutFinishResult | SeamflowError


class Recorder:
    """Records tokens and finishes rollouts; run `keep_sending` in the background."""

    def __init__(self, store: TrajectoryServiceAsyncStub, **bounds: int) -> None:
        """`bounds` are the limits of `RequestBatcher`."""
        self._store = store
        self._batcher = RequestBatcher(self._send, **bounds)
        self.keep_sending = self._batcher.keep_sending

    async def record(self, append: pb.TokenAppend) -> int:
        """Record tokens, retrying without a limit; returns the turn's recorded length.

        Await each append of a turn before the next one: a retried append must not find its
        successor stored.

        Raises:
            ServiceError: the store refused this append.
        """
        result: pb.TokenAppendResult = await self._batcher.send(append)
        return result.appended.num_tokens

    async def finish(self, finish: pb.RolloutFinish) -> None:
        """Finish a rollout after all its turns are recorded.

        Raises:
            ServiceError: the store refused it.
        """
        await self._batcher.send(finish)

    async def _send(self, parts: Sequence[_Part]) -> list[_Answer]:
        request = pb.AppendTokensRequest(
            appends=[part for part in parts if isinstance(part, pb.TokenAppend)],
            finishes=[part for part in parts if isinstance(part, pb.RolloutFinish)],
        )
        _MESSAGES.inc()
        # Every part is idempotent, so a failed message is repeated unchanged.
        response = await call_until_answered(lambda: self._store.AppendTokens(request))
        _APPENDS.inc(sum(not result.HasField("error") for result in response.results))
        appended, finished = iter(response.results), iter(response.finish_results)
        results: list[pb.TokenAppendResult | pb.RolloutFinishResult] = [
            next(appended) if isinstance(part, pb.TokenAppend) else next(finished) for part in parts
        ]
        return [from_status(r.error) if r.HasField("error") else r for r in results]
