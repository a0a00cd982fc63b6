"""A gateway with a scripted rollout server, an environment server, and a process between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seamflow.channel import connect
from seamflow.environment import EnvironmentServerConfig, serving
from seamflow.environment.environment import RewardFunction
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import run_service_pb2 as run_pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as trajectories_pb
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from bench.harness.byte_model import make_byte_model
from rollout.gateway.prompt.chat_template import ChatTemplate
from services.chassis.rpc.server import started
from services.environments.cli import build
from services.environments.config import EnvironmentsConfig
from tests.lib.rollout.gateway.support import ScriptedServer, gateway_addresses, scripted
from tests.lib.rollout.gateway.tools import TOOLS
from tests.lib.trajectory_manager.client import RULES
from tests.lib.trajectory_manager.memory.store import memory_store
from trajectory_manager.model.records import Purpose, Task
from trajectory_manager.store.redis.connect import Store


@dataclass(slots=True)
class World:
    """A run of groups of two, without a process that works on it."""

    gateway: str
    """Address of the rollout gateway."""
    store: Store
    server: ScriptedServer
    template: ChatTemplate
    trajectories: Any
    """Stub of the trajectory service."""

    def say(self, *texts: str) -> None:
        """Script the next answers of the policy."""
        self.server.answers += [[self._answer(text)] for text in texts]

    def always_say(self, text: str) -> None:
        """Script every answer for which none is left."""
        self.server.default_answer = [self._answer(text)]

    def _answer(self, text: str) -> list[int]:
        return [*self.template.encode_text(text), *self.template.stop_token_ids]

    async def submit(
        self, *payloads: str, num_samples: int = 1, purpose: Purpose = Purpose.EVAL, name: str = "t"
    ) -> None:
        """Queue tasks "t0", "t1" …, by default for evaluation: they finish with any rewards."""
        tasks = [
            Task(
                task_id=f"{name}{i}",
                payload_json=payload,
                num_samples=num_samples,
                purpose=purpose,
            )
            for i, payload in enumerate(payloads)
        ]
        await self.store.runs.submit("run", tasks, 100)

    async def ended(self, number: int) -> list[trajectory_pb2.Trajectory]:
        """The first `number` trajectories that have an outcome, by name, once there are as many."""
        async with asyncio.timeout(30):
            while True:
                found = [t for t in await self._trajectories() if has_ended(t)]
                if len(found) >= number:
                    return sorted(found, key=lambda each: each.rollout_id)
                await asyncio.sleep(0.02)

    async def started(self) -> list[str]:
        """Names of all rollouts."""
        return [each.rollout_id for each in await self._trajectories()]

    async def _trajectories(self) -> Sequence[trajectory_pb2.Trajectory]:
        request = trajectories_pb.ListTrajectoriesRequest(run_id="run")
        answer = await self.trajectories.ListTrajectories(request)
        return list(answer.trajectories)


def rewards_of(trajectory: trajectory_pb2.Trajectory) -> dict[tuple[str, str], float]:
    """Values by name and turn."""
    return {(each.name, each.turn_id): each.value for each in trajectory.rewards.rewards}


def has_ended(trajectory: trajectory_pb2.Trajectory) -> bool:
    """Whether it has rewards or a failure."""
    return trajectory.HasField("rewards") or trajectory.HasField("failure")


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    """Everything over real gRPC, in this process."""
    model, server, store = make_byte_model(folder, TOOLS), ScriptedServer(), memory_store()
    rules = trajectory_pb2.RunConfig(reward_name="reward")
    rules.MergeFrom(RULES)
    async with (
        scripted(server) as address,
        gateway_addresses(model, store, servers=(address,)) as (gateway, manager),
        connect(manager) as channel,
    ):
        runs = async_stub(RunServiceStub, channel)
        await runs.CreateRun(run_pb.CreateRunRequest(run_id="run", config=rules))
        stub = async_stub(TrajectoryServiceStub, channel)
        yield World(gateway, store, server, ChatTemplate(model), stub)


@asynccontextmanager
async def working(world: World, environment: str, **settings: Any) -> AsyncIterator[None]:
    """A process that runs episodes of the environment at this address."""
    config = EnvironmentsConfig(
        run_id="run",
        rollout_gateway=world.gateway,
        environment=environment,
        admin_port=-1,
        drain_seconds=0.2,
        **settings,
    )
    async with build(config) as service, started(service, config, "environments"):
        yield


@asynccontextmanager
async def served(
    environment: Any, *, reward: RewardFunction | None = None, **settings: Any
) -> AsyncIterator[str]:
    """Address of a server of this class, and of this reward function."""
    async with serving(environment, EnvironmentServerConfig(**settings), reward=reward) as port:
        yield f"127.0.0.1:{port}"
