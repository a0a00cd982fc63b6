"""rollout.v1.RolloutService, which agents call."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import grpc.aio
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.rollout.v1.rollout_service_pb2_grpc import RolloutServiceServicer
from seamflow.trajectory.v1 import run_service_pb2 as run_pb
from seamflow.trajectory.v1 import trajectory_service_pb2 as store_pb
from seamflow.trajectory.v1.trajectory_pb2 import Trajectory
from seamflow.trajectory.v1.trajectory_pb2 import Turn as RecordedTurn

from rollout.gateway import credentials, limits
from rollout.gateway.config import GatewayConfig
from rollout.gateway.leases import Leases
from rollout.gateway.prompt.answer.recorded_answer import needs_record
from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.gateway.prompt.prompt import Prompt
from rollout.gateway.prompt.validation import (
    check_context,
    check_generate,
    check_start,
    check_tokenize,
    fill_defaults,
    interval_seconds,
)
from rollout.gateway.record.recorder import begin_request
from rollout.gateway.send_buffer import SendBuffer
from rollout.gateway.turn import Send, TurnServices, run_turn
from services.chassis.errors import invalid_argument, not_found
from services.chassis.rpc.clients import call_until_answered
from services.chassis.rpc.request_budget import RequestBudget

if TYPE_CHECKING:
    from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceAsyncStub

Context = grpc.aio.ServicerContext[Any, Any]


class GatewayServicer(RolloutServiceServicer):
    """Keeps no state between calls: any gateway of the run can answer any call."""

    def __init__(
        self,
        services: TurnServices,
        leases: Leases,
        runs: RunServiceAsyncStub,
        template: ChatTemplate,
        config: GatewayConfig,
        budget: RequestBudget,
    ) -> None:
        """`budget` bounds the requests in progress."""
        self._services = services
        self._leases = leases
        self._runs = runs
        self._template = template
        self._config = config
        self._budget = budget

    async def LeaseRollouts(  # noqa: N802
        self, request: pb.LeaseRolloutsRequest, context: Context
    ) -> pb.LeaseRolloutsResponse:
        return await self._leases.lease(request)

    async def ExtendRollouts(  # noqa: N802
        self, request: pb.ExtendRolloutsRequest, context: Context
    ) -> pb.ExtendRolloutsResponse:
        return await self._leases.extend(request)

    async def StartRollout(  # noqa: N802
        self, request: pb.StartRolloutRequest, context: Context
    ) -> pb.StartRolloutResponse:
        check_start(request)
        return await self._leases.start(request)

    def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        credential, config = credentials.shown(context), self._config
        fill_defaults(request.sampling)
        check_generate(request, self._template.vocabulary_size, config)
        check_context(len(request.token_ids.token_ids), self._services.servers.longest_context)
        interval_seconds("chunk_interval", request.chunk_interval)
        heartbeat = interval_seconds("heartbeat_interval", request.heartbeat_interval)
        buffer = SendBuffer(heartbeat or limits.DEFAULT_HEARTBEAT_SECONDS)
        turn = self._turn(request, credential, self._deadline(context), buffer.put)
        return buffer.events(turn)

    async def _turn(
        self, request: pb.GenerateRequest, credential: str, deadline: float | None, send: Send
    ) -> None:
        """Run a checked turn within the bounds of what is in progress."""
        num_bytes = request.ByteSize()
        owner = credentials.digest(credential)
        with self._budget.reserve(num_bytes, owner):
            needed = needs_record(request.messages)
            recorded = (await self._trajectory(request, owner)).turns if needed else ()
            begin, prompt = await self._services.lanes.run(
                owner, num_bytes, lambda: self._begin(request, credential, recorded)
            )
            check_context(len(prompt.ids or ()), self._services.servers.longest_context)
            await run_turn(request, begin, prompt, self._services, deadline, send)

    def _begin(
        self, request: pb.GenerateRequest, credential: str, recorded: Sequence[RecordedTurn]
    ) -> tuple[store_pb.NewTurn, Prompt]:
        """What opens the turn in the store, and its prompt; takes long for a long prompt."""
        history, limit = self._config.history, self._config.max_prompt_tokens
        prompt = Prompt.parse(request, self._template, history, limit, recorded)
        return begin_request(request, credential, prompt, uuid.uuid4().hex), prompt

    async def FinishRollout(  # noqa: N802
        self, request: pb.FinishRolloutRequest, context: Context
    ) -> pb.FinishRolloutResponse:
        finish = store_pb.RolloutFinish(
            run_id=request.run_id,
            rollout_id=request.rollout_id,
            credential_digest=credentials.digest(credentials.shown(context)),
            untrained_turn_ids=request.untrained_turn_ids,
        )
        match request.WhichOneof("outcome"):
            case "rewards":
                finish.rewards.CopyFrom(request.rewards)
            case "failure":
                finish.failure.CopyFrom(request.failure)
        await self._services.recorder.finish(finish)
        return pb.FinishRolloutResponse()

    async def GetRollout(  # noqa: N802
        self, request: pb.GetRolloutRequest, context: Context
    ) -> pb.GetRolloutResponse:
        owner = credentials.digest(credentials.shown(context))
        return pb.GetRolloutResponse(trajectory=await self._trajectory(request, owner))

    async def _trajectory(
        self, request: pb.GetRolloutRequest | pb.GenerateRequest, owner: str
    ) -> Trajectory:
        """The record of a request's rollout, given the digest of its credential."""
        get = store_pb.GetTrajectoryRequest(
            run_id=request.run_id, rollout_id=request.rollout_id, credential_digest=owner
        )
        answer = await call_until_answered(lambda: self._services.store.GetTrajectory(get))
        return answer.trajectory

    async def GetRun(  # noqa: N802
        self, request: pb.GetRunRequest, context: Context
    ) -> pb.GetRunResponse:
        get = run_pb.GetRunRequest(run_id=request.run_id)
        answer = await call_until_answered(lambda: self._runs.GetRun(get))
        return pb.GetRunResponse(run=answer.run)

    async def ListServers(  # noqa: N802
        self, request: pb.ListServersRequest, context: Context
    ) -> pb.ListServersResponse:
        self._check_run(request.run_id)
        return pb.ListServersResponse(servers=self._services.servers.uses())

    async def GetModel(  # noqa: N802
        self, request: pb.GetModelRequest, context: Context
    ) -> pb.GetModelResponse:
        self._check_run(request.run_id)
        template, servers = self._template, self._services.servers
        return pb.GetModelResponse(
            name=template.name,
            vocabulary_size=template.vocabulary_size,
            max_context=servers.shortest_context,
            stop_token_ids=sorted(template.stop_token_ids),
            chat_template=template.source,
            template_fingerprint=template.fingerprint,
            parses_tool_calls=template.format.parses_tool_calls,
            parses_reasoning=template.format.parses_reasoning,
            weight_version=servers.newest_weight_version,
        )

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, context: Context
    ) -> pb.TokenizeResponse:
        owner, num_bytes = credentials.bearer(context), request.ByteSize()
        self._check_run(request.run_id)
        check_tokenize(request, self._config)
        with self._budget.reserve(num_bytes, owner):
            return await self._services.lanes.run(owner, num_bytes, lambda: self._tokenize(request))

    def _tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        template = self._template
        match request.WhichOneof("prompt"):
            case "messages":
                whole = pb.GenerateRequest(messages=request.messages)
                prompt = Prompt.parse(whole, template, "as_sampled")
                assert prompt.conversation is not None
                text = template.render(prompt.conversation) + prompt.constraint.opening
            case "text":
                text = request.text
            case _:
                raise invalid_argument("prompt", None, "give messages or text")
        return pb.TokenizeResponse(token_ids=template.encode_text(text), text=text)

    def _check_run(self, run_id: str) -> None:
        """Raise NOT_FOUND for a run that this gateway does not serve."""
        if run_id != self._config.run_id:
            raise not_found("run", run_id)

    def _deadline(self, context: Context) -> float | None:
        """The agent's deadline on the services' clock; None if there is none."""
        left = context.time_remaining()
        return None if left is None else self._services.clock() + left
