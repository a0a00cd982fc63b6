"""Helpers of the gateway's tests: a byte-level model, a scripted rollout server, a fake store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
from seamflow.common.v1 import tokens_pb2
from seamflow.errors import to_status
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.rollout.v1 import rollout_service_pb2 as rollout_pb
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import (
    RolloutServerServiceServicer,
    add_RolloutServerServiceServicer_to_server,
)
from seamflow.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from bench.harness.constants import changed, split
from rollout.gateway.cli import build
from rollout.gateway.config import GatewayConfig
from services.chassis.config.settings import ServerConfig
from services.chassis.rpc.server import Service, started
from services.lib.token_bytes import pack_ids, pack_logprobs, unpack_ids
from tests.lib.trajectory_manager.client import running_manager
from trajectory_manager.store.redis.connect import Store

if TYPE_CHECKING:
    from seamflow.rollout.v1.rollout_service_pb2_grpc import RolloutServiceAsyncStub
    from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceAsyncStub
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

_LIMITS = "rollout.gateway.limits"
PLAIN = ServerConfig(admin_port=-1, drain_seconds=0.2)
FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content if loop.last else m.content.split('/')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Drops the part of earlier messages before a slash."""


class ScriptedServer(RolloutServerServiceServicer):
    """A rollout server with scripted answers, sent element by element."""

    def __init__(self, server_id: str = "scripted") -> None:
        self.server_id = server_id
        self.answers: list[list[list[int]]] = []
        """Per call: the ids of each element; the last element ends the turn with STOP."""
        self.default_answer: list[list[int]] | None = None
        """The answer of calls for which none is left."""
        self.prompts: list[list[int]] = []
        self.chunk_seconds: list[float] = []
        self.seconds_left: list[float | None] = []
        """Seconds left of each call's deadline; None: no deadline."""
        self.asked = asyncio.Event()
        """A call has come."""
        self.may_answer = asyncio.Event()
        """Until it is set, calls wait for their first element."""
        self.may_answer.set()
        self.may_end = asyncio.Event()
        """Until it is set, calls wait for their last element."""
        self.may_end.set()
        self.num_answered = 0
        """Calls that have had an element."""
        self.num_cancelled = 0
        self.cancelled = asyncio.Event()
        """A call was given up by its caller."""
        self.num_reports = 0
        self.weight_version = 0
        self.sampled_versions: list[int] = []
        """Per call: the version of its tokens; none left: `weight_version`, as it reports."""

    async def known(self) -> None:
        """Wait until a gateway has taken in a report, and so asks for the next."""
        while self.num_reports < 2:
            await asyncio.sleep(0.005)

    async def GenerateTokens(
        self, request: server_pb.GenerateTokensRequest, context: Any
    ) -> AsyncIterator[server_pb.GenerateTokensResponse]:
        """The next answer."""
        self.prompts.append(unpack_ids(request.token_ids))
        self.chunk_seconds.append(request.chunk_interval.ToTimedelta().total_seconds())
        self.seconds_left.append(context.time_remaining())
        self.asked.set()
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            self.cancelled.set()
            raise
        given = self.default_answer if not self.answers else None
        elements = self.answers.pop(0) if given is None else given
        self.num_answered += 1
        version = self.sampled_versions.pop(0) if self.sampled_versions else self.weight_version
        for index, ids in enumerate(elements, 1):
            if index == len(elements):
                await self.may_end.wait()
            response = server_pb.GenerateTokensResponse(tokens=sampled(ids, self.server_id))
            for span in response.tokens.spans:
                span.weight_version = version
            if index == len(elements):
                response.finish_reason = tokens_pb2.FINISH_REASON_STOP
            yield response

    async def GetServerInfo(
        self, request: server_pb.GetServerInfoRequest, context: Any
    ) -> server_pb.GetServerInfoResponse:
        """Serving."""
        self.num_reports += 1
        return server_pb.GetServerInfoResponse(
            server_id=self.server_id,
            state=server_pb.SERVER_STATE_SERVING,
            max_running=8,
            weight_version=self.weight_version,
        )


@asynccontextmanager
async def scripted(server: ScriptedServer) -> AsyncIterator[str]:
    """Serve it; its address."""
    service = Service(servicers=[(add_RolloutServerServiceServicer_to_server, server)])
    async with started(service, PLAIN, "scripted") as port:
        yield f"127.0.0.1:{port}"


@asynccontextmanager
async def gateway(
    model: Path, kept: Store | None = None, **settings: Any
) -> AsyncIterator[tuple[RolloutServiceAsyncStub, TrajectoryServiceAsyncStub, RunServiceAsyncStub]]:
    """A gateway of run "run" and a trajectory manager, which keeps all in `kept`; their stubs."""
    async with (
        gateway_addresses(model, kept, **settings) as (ours, managers),
        # Without probes an agent that does not read holds 64 KiB back, not megabytes.
        grpc.aio.insecure_channel(ours, options=[("grpc.http2.bdp_probe", 0)]) as agent,
        grpc.aio.insecure_channel(managers) as inside,
    ):
        yield (
            async_stub(RolloutServiceStub, agent),
            async_stub(TrajectoryServiceStub, inside),
            async_stub(RunServiceStub, inside),
        )


@asynccontextmanager
async def gateway_addresses(
    model: Path, kept: Store | None = None, **settings: Any
) -> AsyncIterator[tuple[str, str]]:
    """The same; the addresses of gateway and trajectory manager. `settings` may name limits."""
    async with running_manager(kept) as manager:
        given, constants = split(_LIMITS, {"port": 0, **settings})
        ours = GatewayConfig(
            run_id="run",
            model=model,
            trajectory_manager=f"127.0.0.1:{manager}",
            admin_port=-1,
            drain_seconds=0.2,
            **given,
        )
        with changed(_LIMITS, constants):
            async with build(ours) as service, started(service, ours, "gateway") as port:
                yield f"127.0.0.1:{port}", f"127.0.0.1:{manager}"


def sampled(ids: Sequence[int], server_id: str = "scripted") -> tokens_pb2.PackedTokens:
    """`ids` as one span of policy tokens."""
    span = tokens_pb2.Span(
        num_tokens=len(ids),
        origin=tokens_pb2.ORIGIN_POLICY,
        version_source=tokens_pb2.VERSION_SOURCE_ENGINE,
        server_id=server_id,
    )
    return tokens_pb2.PackedTokens(
        token_ids=pack_ids(ids),
        logprobs=pack_logprobs([-0.5] * len(ids)),
        spans=[span] if ids else [],
    )


def message(role: str, text: str) -> rollout_pb.Message:
    """A message of one text."""
    return rollout_pb.Message(role=role, content=[rollout_pb.ContentPart(type="text", text=text)])


def bearer(credential: str) -> tuple[tuple[str, str], ...]:
    """Metadata that shows a rollout's credential."""
    return (("authorization", f"Bearer {credential}"),)


def refusal(code: grpc.StatusCode, reason: str, retry_after: float = 0.0) -> pb.TokenAppendResult:
    """An error result, as the store writes it."""
    message = f"refused: {reason}"
    error = to_status(code, message, reason, retry_after=retry_after or None)
    return pb.TokenAppendResult(error=error)


class FakeStore:
    """AppendTokens of a store in this process: keeps what it gets, answers when it may."""

    def __init__(self) -> None:
        self.messages: list[list[pb.TokenAppend]] = []
        self.failures: list[grpc.aio.AioRpcError] = []
        """Raised for whole messages, one each, before anything is answered."""
        self.results: dict[str, list[pb.TokenAppendResult]] = {}
        """By turn: what its next appends are answered; then all is accepted."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.num_in_flight = self.max_in_flight = 0

    async def AppendTokens(self, request: pb.AppendTokensRequest) -> pb.AppendTokensResponse:
        """See `TrajectoryService`."""
        self.messages.append(list(request.appends))
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        await self.may_answer.wait()
        self.num_in_flight -= 1
        if self.failures:
            raise self.failures.pop(0)
        return pb.AppendTokensResponse(results=map(self._result, request.appends))

    def _result(self, append: pb.TokenAppend) -> pb.TokenAppendResult:
        scripted = self.results.get(append.turn_id)
        if scripted:
            return scripted.pop(0)
        num_tokens = append.offset + len(append.tokens.token_ids) // 4
        return pb.TokenAppendResult(appended=pb.AppendedTokens(num_tokens=num_tokens))


def failed(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    """What a stub raises."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="no")


async def until_idle() -> None:
    """Let every task run until all of them wait."""
    for _ in range(20):
        await asyncio.sleep(0)
