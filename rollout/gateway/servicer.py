"""rollout.v1.RolloutService: what agents talk to."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import uuid
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.rollout.v1.rollout_service_pb2_grpc import RolloutServiceServicer
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as store_pb

from rollout.gateway.calls import answered
from rollout.gateway.dispatch.server_pool import Servers
from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.gateway.prompt.prompt import Prompt, digest, with_defaults
from rollout.gateway.record.recorder import Recorder
from rollout.gateway.record.turn_opener import Opener
from rollout.gateway.send_buffer import Outbox
from rollout.gateway.turn import Turn
from services.chassis.errors import invalid_argument
from services.chassis.rpc.tracing import traceparent

if TYPE_CHECKING:
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

__all__ = ["GatewayServicer"]

Context = grpc.aio.ServicerContext[Any, Any]

_MAX_INTERVAL_SECONDS = 86_400.0


class GatewayServicer(RolloutServiceServicer):
    """Keeps no state: any gateway can answer any call."""

    def __init__(
        self,
        store: TrajectoryServiceAsyncStub,
        opener: Opener,
        recorder: Recorder,
        servers: Servers,
        template: ChatTemplate,
        secret: bytes,
        heartbeat_seconds: float,
    ) -> None:
        self._store = store
        self._opener = opener
        self._recorder = recorder
        self._servers = servers
        self._template = template
        self._secret = secret
        self._heartbeat_seconds = heartbeat_seconds

    async def StartRollout(  # noqa: N802
        self, request: pb.StartRolloutRequest, context: Context
    ) -> pb.StartRolloutResponse:
        """Open a rollout under a credential of its own."""
        _check_start(request)
        credential = self._credential(request)
        start = store_pb.NewRollout(
            run_id=request.run_id,
            rollout_id=request.rollout_id,
            lease_token=request.lease_token,
            purpose=request.purpose,
            credential_digest=digest(credential),
            traceparent=traceparent() or "",
        )
        if request.HasField("pinned_weight_version"):
            start.pinned_weight_version = request.pinned_weight_version
        await self._opener.start(start)
        return pb.StartRolloutResponse(credential=credential)

    def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """One turn, recorded before it is forwarded."""
        with_defaults(request.sampling)
        _seconds("chunk_interval", request.chunk_interval)
        heartbeat = _seconds("heartbeat_interval", request.heartbeat_interval)
        outbox = Outbox(heartbeat or self._heartbeat_seconds)
        turn = Turn(
            request,
            Prompt(request, self._template),
            uuid.uuid4().hex,
            self._store,
            self._servers,
            self._opener.begin,
            self.record,
            outbox.put,
            _deadline(context),
        )
        return outbox.events(turn.run())

    async def FinishRollout(  # noqa: N802
        self, request: pb.FinishRolloutRequest, context: Context
    ) -> pb.FinishRolloutResponse:
        """Close a rollout with rewards or with a failure."""
        finish = store_pb.RolloutFinish(
            run_id=request.run_id,
            rollout_id=request.rollout_id,
            credential_digest=digest(request.credential),
            rewards=request.rewards,
            failure_class=request.failure_class,
            failure_message=request.failure_message,
        )
        await self._recorder.finish(finish)
        return pb.FinishRolloutResponse()

    async def GetRollout(  # noqa: N802
        self, request: pb.GetRolloutRequest, context: Context
    ) -> pb.GetRolloutResponse:
        """What is recorded of a rollout, for whoever holds its credential."""
        get = store_pb.GetTrajectoryRequest(
            run_id=request.run_id,
            rollout_id=request.rollout_id,
            credential_digest=digest(request.credential),
        )
        answer = await answered(lambda: self._store.GetTrajectory(get))
        return _view(answer.trajectory)

    async def record(self, append: store_pb.TokenAppend) -> None:
        """Record before forward: returns once the store has acknowledged the tokens."""
        await self._recorder.record(append)

    def _credential(self, request: pb.StartRolloutRequest) -> str:
        """The same for a repeated request, so that StartRollout is idempotent."""
        name = "\0".join((request.run_id, request.rollout_id, request.lease_token))
        return hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()


def _deadline(context: Context) -> float | None:
    """The caller's deadline, on the event loop's clock."""
    left = context.time_remaining()
    return None if left is None else asyncio.get_running_loop().time() + left


def _seconds(name: str, interval: Duration) -> float:
    """What the caller names; 0: nothing."""
    seconds: float = interval.seconds + interval.nanos / 1e9
    if not 0.0 <= seconds <= _MAX_INTERVAL_SECONDS:
        cure = f"must be 0 to {_MAX_INTERVAL_SECONDS:g} seconds; 0 is our own interval"
        raise invalid_argument(name, seconds, cure)
    return seconds


def _check_start(request: pb.StartRolloutRequest) -> None:
    for name in ("run_id", "rollout_id"):
        if not getattr(request, name):
            raise invalid_argument(name, "", "must not be empty")
    if request.purpose not in (tokens_pb2.PURPOSE_TRAIN, tokens_pb2.PURPOSE_EVAL):
        raise invalid_argument("purpose", request.purpose, "must be PURPOSE_TRAIN or PURPOSE_EVAL")
    is_train = request.purpose == tokens_pb2.PURPOSE_TRAIN
    if is_train and request.HasField("pinned_weight_version"):
        raise invalid_argument(
            "pinned_weight_version", request.pinned_weight_version, "only EVAL may pin a version"
        )


def _view(trajectory: trajectory_pb2.Trajectory) -> pb.GetRolloutResponse:
    return pb.GetRolloutResponse(
        turns=[
            pb.TurnView(
                turn_id=turn.turn_id,
                parent_turn_id=turn.parent_turn_id,
                prefix_length=turn.prefix_length,
                tokens=turn.tokens,
                finish_reason=turn.finish_reason,
            )
            for turn in trajectory.turns
        ],
        rewards=trajectory.rewards,
        finished=trajectory.state != trajectory_pb2.ROLLOUT_STATE_RUNNING,
    )
