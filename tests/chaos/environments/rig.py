"""A run whose episodes are those of environment servers that break."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from seamflow.channel import connect
from seamflow.common.v1 import tokens_pb2
from seamflow.durations import seconds_of, to_duration
from seamflow.environment import EnvironmentClient
from seamflow.pages import pages
from seamflow.retry import retrying
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import run_service_pb2 as run_pb
from seamflow.trajectory.v1 import task_service_pb2 as task_pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as trajectories_pb
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub
from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceStub
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from bench.harness import processes
from bench.harness.byte_model import make_byte_model
from bench.harness.processes import Server
from bench.harness.redis_process import FAST, free_port, redis_server
from tests.chaos.environments.checker import Verdict, check
from tests.chaos.environments.environment import REWARD, ended_episodes, order_hangs

RUN_ID = "chaos"
GROUP_SIZE = 4
NUM_SERVERS = 2
_EPISODES_PER_SERVER = 12
_STEP_SECONDS = 0.3
_STEP_TIMEOUT = 5.0
_END_SECONDS = 300.0
_SHARE = 0.95
"""Throughput counts until this share of the rollouts has finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """What goes wrong in a run."""

    kills: int = 0
    """SIGKILLs of environment servers, which are then started again."""
    hangs: int = 0
    """Steps that never return."""
    slow: bool = False
    """Whether steps take lognormal times with a heavy tail, of the same mean."""
    every_seconds: float = 1.5
    """Time between two events."""
    module: str = "services.environments"
    """The process that runs the episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run found."""

    verdict: Verdict
    rollouts_per_second: float
    num_kills: int
    num_hangs: int
    """Steps that were really stuck."""


@dataclass(slots=True)
class Rig:
    """The processes of a run, all real but the engine's model."""

    folder: Path
    servers: list[Server]
    manager: str

    async def submit(self, num_tasks: int) -> list[str]:
        """Queue tasks; their names."""
        names = [f"task-{i}" for i in range(num_tasks)]
        tasks = [
            trajectory_pb2.Task(task_id=name, payload_json="{}", purpose=tokens_pb2.PURPOSE_TRAIN)
            for name in names
        ]
        async with connect(self.manager) as channel:
            stub = async_stub(TaskServiceStub, channel)
            request = task_pb.SubmitTasksRequest(run_id=RUN_ID, tasks=tasks)
            await retrying(lambda: stub.SubmitTasks(request), timeout=60)
        return names

    async def trajectories(self) -> list[trajectory_pb2.Trajectory]:
        """All rollouts, without their tokens."""
        async with connect(self.manager) as channel:
            stub = async_stub(TrajectoryServiceStub, channel)
            request = trajectories_pb.ListTrajectoriesRequest(
                run_id=RUN_ID, page_size=1000, headers_only=True
            )
            listed = pages(lambda page: retrying(lambda: stub.ListTrajectories(page)), request)
            return [each async for page in listed for each in page.trajectories]

    async def ended(self, number: int) -> list[trajectory_pb2.Trajectory]:
        """The rollouts once `number` have finished, or nothing more is waited for."""
        limit = time.monotonic() + _END_SECONDS
        while True:
            found = await self.trajectories()
            finished = sum(each.HasField("rewards") for each in found)
            if finished >= number or time.monotonic() > limit:
                return found
            await asyncio.sleep(1.0)


async def run(
    folder: Path,
    disturbance: Disturbance,
    num_tasks: int,
    seed: int,
    progress: Callable[[], None] = lambda: None,
) -> RunResult:
    """One run of so many groups; `progress` is called at each event."""
    folder.mkdir(parents=True)
    async with rig(folder, disturbance) as made:
        names = await made.submit(num_tasks)
        disturbing = asyncio.create_task(_disturb(made, disturbance, Random(seed), progress))
        try:
            found = await made.ended(num_tasks * GROUP_SIZE)
            num_kills = await disturbing
        finally:
            disturbing.cancel()
    verdict = check(found, ended_episodes(folder), names, GROUP_SIZE, REWARD)
    return RunResult(
        verdict=verdict,
        rollouts_per_second=_throughput(found),
        num_kills=num_kills,
        num_hangs=len(list(folder.glob("hung-*"))),
    )


@asynccontextmanager
async def rig(folder: Path, disturbance: Disturbance) -> AsyncIterator[Rig]:
    """Redis, trajectory manager, rollout server and gateway, environments and their servers."""
    async with AsyncExitStack() as stack:
        redis_url = stack.enter_context(redis_server(FAST))
        manager = processes.manager(folder, redis_url, durability="fast")
        stack.enter_context(manager)
        engine = processes.service(
            "rollout.server",
            "rollout_server",
            folder,
            engine="fake",
            run_id=RUN_ID,
            max_running=256,
            fake_mean_tokens=8,
            fake_vocab_size=261,
        )
        stack.enter_context(engine)
        gateway = processes.service(
            "rollout.gateway",
            "rollout_gateway",
            folder,
            run_id=RUN_ID,
            model=make_byte_model(folder / "model"),
            trajectory_manager=manager.address,
            servers=engine.address,
        )
        stack.enter_context(gateway)
        await _create_run(manager.address)
        servers = [_environment(folder, i, disturbance) for i in range(NUM_SERVERS)]
        for server in servers:
            stack.enter_context(server)
        for server in servers:
            stack.enter_context(_episodes(folder, gateway.address, server, disturbance))
        yield Rig(folder=folder, servers=servers, manager=manager.address)


def _environment(folder: Path, index: int, disturbance: Disturbance) -> Server:
    arguments = {"folder": str(folder), "step_seconds": _STEP_SECONDS, "slow": disturbance.slow}
    port = free_port()
    command = processes.python(
        "seamflow.environment",
        "--environment",
        "tests.chaos.environments.environment:Worker",
        "--arguments",
        json.dumps(arguments),
        "--port",
        str(port),
    )
    return Server(f"environment-{index}", command, folder, processes.environment(), port)


def _episodes(folder: Path, gateway: str, server: Server, disturbance: Disturbance) -> Server:
    """The process that runs episodes of one environment server."""
    return processes.service(
        disturbance.module,
        "environments",
        folder,
        run_id=RUN_ID,
        rollout_gateway=gateway,
        environment=server.address,
        max_episodes=_EPISODES_PER_SERVER,
        max_new_tokens=16,
        step_timeout_seconds=_STEP_TIMEOUT,
    )


async def _create_run(manager: str) -> None:
    rules = trajectory_pb2.RunConfig(
        group_size=GROUP_SIZE,
        groups_per_step=1000,
        max_staleness=10,
        staleness_policy=trajectory_pb2.STALENESS_POLICY_DROP,
        lease_duration=to_duration(60),
        durability=trajectory_pb2.DURABILITY_FAST,
        reward_name="reward",
    )
    async with connect(manager) as channel:
        stub = async_stub(RunServiceStub, channel)
        request = run_pb.CreateRunRequest(run_id=RUN_ID, config=rules)
        await retrying(lambda: stub.CreateRun(request), timeout=60)


async def _disturb(
    made: Rig, disturbance: Disturbance, random: Random, progress: Callable[[], None]
) -> int:
    """Kill and hang in random order; how often a server was killed."""
    events = [*["kill"] * disturbance.kills, *["hang"] * disturbance.hangs]
    random.shuffle(events)
    num_kills = 0
    for index, event in enumerate(events):
        await asyncio.sleep(disturbance.every_seconds * random.uniform(0.5, 1.5))
        if event == "hang":
            order_hangs(made.folder, index)
        else:
            server = made.servers[num_kills % len(made.servers)]
            await _restart(server)
            num_kills += 1
        progress()
    return num_kills


async def _restart(server: Server) -> None:
    """SIGKILL, and a new process on the same port."""
    await asyncio.to_thread(server.kill)
    server.start()
    async with EnvironmentClient(server.address, connect_timeout=None) as client:
        await client.describe()


def _throughput(found: Sequence[trajectory_pb2.Trajectory]) -> float:
    """Finished rollouts per second, but for the last ones; 0 if none has finished."""
    began = min(seconds_of(each.create_time) for each in found)
    times = sorted(seconds_of(each.finish_time) for each in found if each.HasField("rewards"))
    if not times:
        return 0.0
    counted = max(1, int(_SHARE * len(times)))
    seconds: float = times[counted - 1] - began
    return counted / seconds
