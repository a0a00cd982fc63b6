"""Every process of a training run, small and real: the engine alone is the fake one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.duration_pb2 import Duration
from seamflow import Client
from seamflow.channel import connect
from seamflow.common.v1.tokens_pb2 import SamplingParams
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceStub
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import run_service_pb2 as run_pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub

from tests.lib.end_to_end.support import Process
from tests.lib.redis_server import RedisServer, free_port
from tests.suites.environments.training.tiny_start import make_model

RUN_ID = "watched"
STEPS = 2
_WORDS = ("yes", "no", "word")
_VOCABULARY = 10
_WAIT_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRig:
    """The processes, by table."""

    processes: Mapping[str, Process]
    admin_ports: Mapping[str, int]

    async def play_group(self, name: str) -> None:
        """Two rollouts with different rewards: the whole batch of a step."""
        async with Client(self.processes["rollout_gateway"].address, run_id=RUN_ID) as client:
            for member in range(2):
                rollout = await client.start_rollout(f"{name}-{member}", group=(name, 2))
                sampling = SamplingParams(max_new_tokens=4, ignore_eos=True)
                await rollout.generate([{"role": "user", "content": "word"}], sampling)
                await rollout.finish(float(member))

    async def until_version(self, version: int) -> None:
        """Wait until the rollout server serves these weights."""
        limit = time.monotonic() + _WAIT_SECONDS
        async with connect(self.processes["rollout_server"].address) as channel:
            stub = async_stub(RolloutServerServiceStub, channel)
            request = server_pb.GetServerInfoRequest()
            while (await stub.GetServerInfo(request)).weight_version < version:
                assert time.monotonic() < limit, f"version {version} was never loaded"
                await asyncio.sleep(0.05)

    async def create_run(self) -> None:
        """A run with a step for each group."""
        config = trajectory_pb2.RunConfig(
            group_size=2,
            groups_per_step=1,
            max_staleness=4,
            staleness_policy=trajectory_pb2.STALENESS_POLICY_MASK,
            lease_duration=Duration(seconds=60),
            durability=trajectory_pb2.DURABILITY_FAST,
        )
        async with connect(self.processes["trajectory_manager"].address) as channel:
            stub = async_stub(RunServiceStub, channel)
            await stub.CreateRun(run_pb.CreateRunRequest(run_id=RUN_ID, config=config))


@asynccontextmanager
async def run_rig(
    folder: Path, shared: Mapping[str, object], manager: str = "trajectory_manager"
) -> AsyncIterator[RunRig]:
    """Start them with `shared` settings; `manager` is the module of the trajectory manager."""
    redis = RedisServer(folder / "redis")
    redis.start()
    make_model(folder / "model", _WORDS, seed=0)
    processes, admin_ports = _processes(folder, redis.url, shared, manager)
    rig = RunRig(processes=processes, admin_ports=admin_ports)
    with ThreadPoolExecutor() as threads:
        try:
            first = processes["trajectory_manager"]
            await asyncio.to_thread(first.start)
            await rig.create_run()
            others = [process for process in processes.values() if process is not first]
            await asyncio.to_thread(lambda: list(threads.map(Process.start, others)))
            yield rig
        finally:
            await asyncio.to_thread(lambda: list(threads.map(Process.stop, processes.values())))
            redis.stop()


def _processes(
    folder: Path, redis_url: str, shared: Mapping[str, object], manager: str
) -> tuple[dict[str, Process], dict[str, int]]:
    made: dict[str, Process] = {}
    admin_ports: dict[str, int] = {}

    def add(table: str, module: str, **settings: object) -> str:
        admin_ports[table] = free_port()
        given = {"admin_port": admin_ports[table], "drain_seconds": 1, **shared, **settings}
        made[table] = Process(module, table, folder, **given)
        return made[table].address

    run = {"run_id": RUN_ID, "model": folder / "model"}
    store = add("trajectory_manager", manager, redis_url=redis_url, durability="fast")
    weights = add("weights", "services.weights", redis_url=redis_url, folder=folder / "weights")
    add("scheduler", "scheduler", redis_url=redis_url)
    server = add(
        "rollout_server",
        "rollout.server",
        engine="fake",
        weights=weights,
        fake_vocab_size=_VOCABULARY,
        **run,
    )
    gateway = add(
        "rollout_gateway", "rollout.gateway", trajectory_manager=store, servers=server, **run
    )
    add("http_gateway", "rollout.http_gateway", rollout_gateway=gateway, run_id=RUN_ID, http_port=0)
    add(
        "trainer",
        "trainer",
        trajectory_manager=store,
        weights=weights,
        num_steps=STEPS,
        checkpoint__folder=folder / "checkpoints",
        batch__micro_batch_tokens=64,
        **run,
    )
    return made, admin_ports
