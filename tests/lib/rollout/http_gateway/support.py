"""A whole system behind an HTTP gateway in this process, with a scripted rollout server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
from anthropic import AsyncAnthropic
from google.protobuf.duration_pb2 import Duration
from openai import AsyncOpenAI
from seamflow.channel import connect
from seamflow.credentials import Credentials
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import run_service_pb2 as run_pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub

from bench.harness.byte_model import make_byte_model
from bench.harness.constants import changed, split
from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.http_gateway.cli import build
from rollout.http_gateway.config import HttpGatewayConfig
from services.chassis.rpc.server import started
from tests.lib.rollout.gateway.support import ScriptedServer, gateway_addresses, scripted
from tests.lib.rollout.gateway.tools import TOOLS
from tests.lib.trajectory_manager.client import RULES
from tests.lib.trajectory_manager.memory.store import memory_store
from trajectory_manager.model.records import Purpose, Task
from trajectory_manager.store.redis.connect import Store

_LIMITS = "rollout.http_gateway.limits"
ADD: Any = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
}


@dataclass(slots=True)
class World:
    """An agent at the HTTP gateway, and what is behind it."""

    url: str
    """The HTTP gateway."""
    gateway: str
    """Address of the gRPC gateway."""
    store: Store
    server: ScriptedServer
    template: ChatTemplate
    http: aiohttp.ClientSession
    agent: dict[str, str] = field(default_factory=dict)
    """Headers with the agents' token."""
    rollout: dict[str, Any] = field(default_factory=dict)
    """An evaluation rollout, as POST /rollouts answers."""

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> tuple[int, Any]:
        """Status and JSON of a request below the gateway."""
        async with self.http.post(f"{self.url}{path}", json=body, **kwargs) as response:
            return response.status, await response.json()

    async def start(self, **fields: Any) -> dict[str, Any]:
        """A rollout of the agent's own."""
        status, rollout = await self.post("/rollouts", fields, headers=self.agent)
        assert status == 200, rollout
        return dict(rollout)

    def say(self, *texts: str) -> None:
        """Script the next answers, each in two elements."""
        for text in texts:
            ids = [i for letter in text for i in self.template.encode_text(letter)]
            middle = len(ids) // 2
            stop = [*ids[middle:], *self.template.stop_token_ids]
            self.server.answers.append([ids[:middle], stop])

    def openai(self, **settings: Any) -> AsyncOpenAI:
        """The official SDK, for the evaluation rollout."""
        rollout = self.rollout
        return AsyncOpenAI(base_url=rollout["base_url"], api_key=rollout["credential"], **settings)

    def anthropic(self, **settings: Any) -> AsyncAnthropic:
        """The official SDK, for the evaluation rollout."""
        url, key = self.rollout["anthropic_base_url"], self.rollout["credential"]
        return AsyncAnthropic(base_url=url, api_key=key, **settings)

    async def submit(self, *names: str) -> None:
        """Queue tasks of two rollouts each."""
        tasks = [
            Task(task_id=name, payload_json='{"x": 1}', num_samples=2, purpose=Purpose.TRAIN)
            for name in names
        ]
        await self.store.runs.submit("run", tasks, 100)

    async def recorded(self) -> dict[str, trajectory_pb2.Turn]:
        """The turns of the evaluation rollout in their order, as the gateway returns them."""
        async with grpc.aio.insecure_channel(self.gateway) as channel:
            request = pb.GetRolloutRequest(run_id="run", rollout_id=self.rollout["rollout_id"])
            bearer = (("authorization", f"Bearer {self.rollout['credential']}"),)
            stub = async_stub(RolloutServiceStub, channel)
            answer = await stub.GetRollout(request, metadata=bearer)
        return {turn.turn_id: turn for turn in answer.trajectory.turns}


@asynccontextmanager
async def world(
    folder: Path,
    tokens: Mapping[str, str] | None = None,
    lease: Duration = RULES.lease_duration,
    model: Path | None = None,
    server: ScriptedServer | None = None,
    **settings: Any,
) -> AsyncIterator[World]:
    """Everything over real gRPC and HTTP; the run trains groups of two. `tokens` are settings."""
    tokens, store = tokens or {}, memory_store()
    model, server = model or make_byte_model(folder, TOOLS), server or ScriptedServer()
    rules = trajectory_pb2.RunConfig(reward_name="reward")
    rules.MergeFrom(RULES)
    rules.lease_duration.CopyFrom(lease)
    async with (
        scripted(server) as address,
        gateway_addresses(model, store, servers=(address,), **tokens) as (gateway, manager),
        connect(manager, Credentials(token=tokens.get("token"))) as channel,
        http_gateway(gateway, **tokens, **settings) as url,
        aiohttp.ClientSession() as http,
    ):
        runs = async_stub(RunServiceStub, channel)
        await runs.CreateRun(run_pb.CreateRunRequest(run_id="run", config=rules))
        found = World(url, gateway, store, server, ChatTemplate(model), http)
        if "agent_token" in tokens:
            found.agent = {"authorization": f"Bearer {tokens['agent_token']}"}
        found.rollout = await found.start()
        yield found


@asynccontextmanager
async def http_gateway(gateway: str, **settings: Any) -> AsyncIterator[str]:
    """An HTTP gateway of run "run" in front of `gateway`; its URL. `settings` may name limits."""
    given, limits = split(_LIMITS, {"admin_port": -1, "drain_seconds": 0.2, **settings})
    config = HttpGatewayConfig(run_id="run", rollout_gateway=gateway, **given)
    with changed(_LIMITS, limits):
        async with build(config) as service, started(service, config, "http_gateway"):
            yield f"http://127.0.0.1:{service.ports['http_port']}"
