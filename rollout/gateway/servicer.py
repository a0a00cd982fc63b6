"""rollout.v1.RolloutService, which agents call."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.rollout.v1.rollout_service_pb2_grpc import RolloutServiceServicer
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as store_pb

from rollout.gateway import credentials
from rollout.gateway.calls import call_until_answered
from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.gateway.prompt.prompt import Prompt
from rollout.gateway.prompt.validation import (
    check_generate,
    check_start,
    fill_defaults,
    interval_seconds,
)
from rollout.gateway.send_buffer import SendBuffer
from rollout.gateway.turn import Turn, TurnServices
from services.chassis.rpc.tracing import traceparent

__all__ = ["GatewayServicer"]

Context = grpc.aio.ServicerContext[Any, Any]


class GatewayServicer(RolloutServiceServicer):
    """Keeps no state between calls: any gateway of the run can answer any call."""

    def __init__(
        self,
        services: TurnServices,
        template: ChatTemplate,
        secret: bytes,
        default_heartbeat_seconds: float,
    ) -> None:
        """`secret` is the key that credentials are derived from; gateways of a run share it."""
        self._services = services
        self._template = template
        self._secret = secret
        self._default_heartbeat_seconds = default_heartbeat_seconds

    async def StartRollout(  # noqa: N802
        self, request: pb.StartRolloutRequest, context: Context
    ) -> pb.StartRolloutResponse:
        """Open a rollout and return its credential."""
        check_start(request)
        credential = credentials.derive(self._secret, request)
        start = store_pb.NewRollout(
            run_id=request.run_id,
            rollout_id=request.rollout_id,
            lease_token=request.lease_token,
            purpose=request.purpose,
            credential_digest=credentials.digest(credential),
            traceparent=traceparent() or "",
        )
        if request.HasField("pinned_weight_version"):
            start.pinned_weight_version = request.pinned_weight_version
        await self._services.opener.start(start)
        return pb.StartRolloutResponse(credential=credential)

    def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Run one turn; its tokens are recorded before they are forwarded."""
        fill_defaults(request.sampling)
        check_generate(request, self._template.vocabulary_size)
        interval_seconds("chunk_interval", request.chunk_interval)
        heartbeat = interval_seconds("heartbeat_interval", request.heartbeat_interval)
        prompt = Prompt.parse(request, self._template)
        turn = Turn(request, prompt, uuid.uuid4().hex, self._services, self._deadline(context))
        buffer = SendBuffer(heartbeat or self._default_heartbeat_seconds)
        return buffer.events(turn.run(buffer.put))

    async def FinishRollout(  # noqa: N802
        self, request: pb.FinishRolloutRequest, context: Context
    ) -> pb.FinishRolloutResponse:
        """Finish a rollout with rewards or with a failure."""
        finish = store_pb.RolloutFinish(
            run_id=request.run_id,
            rollout_id=request.rollout_id,
            credential_digest=credentials.digest(request.credential),
            rewards=request.rewards,
            failure_class=request.failure_class,
            failure_message=request.failure_message,
        )
        await self._services.recorder.finish(finish)
        return pb.FinishRolloutResponse()

    async def GetRollout(  # noqa: N802
        self, request: pb.GetRolloutRequest, context: Context
    ) -> pb.GetRolloutResponse:
        """Return the recorded turns and rewards of a rollout, given its credential."""
        get = store_pb.GetTrajectoryRequest(
            run_id=request.run_id,
            rollout_id=request.rollout_id,
            credential_digest=credentials.digest(request.credential),
        )
        answer = await call_until_answered(lambda: self._services.store.GetTrajectory(get))
        return _view(answer.trajectory)

    def _deadline(self, context: Context) -> float | None:
        """The agent's deadline on the services' clock; None: none."""
        left = context.time_remaining()
        return None if left is None else self._services.clock() + left


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
