"""A run's processes, by the targets of deploy/monitoring/prometheus.yml, and its agents."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from seamflow import Client
from seamflow.channel import connect
from seamflow.common.v1.tokens_pb2 import SamplingParams
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import run_service_pb2 as run_pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub

from tests.lib.end_to_end.support import Process
from tests.lib.node_agent.support import Workers
from tests.lib.redis_server import RedisServer, free_port
from tests.suites.alerts.faulty_engine import FAULT_FILE
from tests.suites.environments.training.tiny_start import make_model

RUN_ID = "alerted"
HEALTHY_STEPS = 6
"""Steps of the healthy run, which then ends."""
_WORDS = ("yes", "no", "word")
_ADMIN = 9100  # in the targets
_REFUSED = {
    "trajectory-manager": "trajectory.v1.RunService/GetRun",
    "rollout-gateway": "rollout.v1.RolloutService/GetRollout",
    "rollout-server-a": "rollout.v1.RolloutServerService/RestoreMemory",
    "weights": "weights.v1.WeightService/GetManifest",
    "scheduler": "scheduler.v1.SchedulerService/DrainNode",
    "trainer": "trainer.v1.TrainerService/KeepCheckpoint",
}


class AlertRig:
    """Processes by name, such as "rollout-server-a", and what happens to them."""

    def __init__(self, folder: Path) -> None:
        self.redis = RedisServer(folder / "redis")
        self.processes: dict[str, Process] = {}
        self.ports: dict[str, int] = {}
        """Admin port by target of Prometheus."""
        self.http_port = free_port()
        self.fault_file = folder / "fault"
        self._number = 0
        self._folder = folder
        os.environ[FAULT_FILE] = str(self.fault_file)

    def __getitem__(self, name: str) -> Process:
        return self.processes[name]

    def add(self, name: str, module: str, table: str, **settings: object) -> str:
        """One more process; its address."""
        target = f"{name}:{_ADMIN}"
        self.ports.setdefault(target, free_port())
        given = {"admin_port": self.ports[target], "drain_seconds": 1, **settings}
        self.processes[name] = Process(module, table, self._folder, **given)
        return self.processes[name].address

    def add_all(self, scorer: str) -> None:
        """Every process of the run but its trainer; `scorer` is the other worker of node b."""
        url, run = self.redis.url, {"run_id": RUN_ID, "model": self._folder / "model"}
        store = self.add(
            "trajectory-manager", "trajectory_manager", "trajectory_manager", redis_url=url
        )
        weights = self.add(
            "weights",
            "services.weights",
            "weights",
            redis_url=url,
            folder=self._folder / "weights",
        )
        scheduler = self.add(
            "scheduler", "tests.suites.alerts.quick_scheduler", "scheduler", redis_url=url
        )
        self.add_server("rollout-server-a", engine="fake")
        self.add_server("rollout-server-b", engine="tests.suites.alerts.faulty_engine:FaultyEngine")
        servers = f"{self['rollout-server-a'].address},{self['rollout-server-b'].address}"
        gateway = self.add(
            "rollout-gateway",
            "rollout.gateway",
            "rollout_gateway",
            trajectory_manager=store,
            servers=servers,
            weights=weights,
            **run,
        )
        self.add(
            "http-gateway",
            "rollout.http_gateway",
            "http_gateway",
            rollout_gateway=gateway,
            run_id=RUN_ID,
            http_port=self.http_port,
            hold_seconds=1,
        )
        for name, server in (("a", "rollout-server-a"), ("b", "rollout-server-b")):
            self.add(
                f"node-agent-{name}",
                "services.node_agent",
                "node_agent",
                node_id=name,
                run_id=RUN_ID,
                capability_tags="rollout,score" if name == "b" else "rollout",
                scheduler=scheduler,
                rollout_server=self[server].address,
                **(
                    {"workers": f'[{{"tag": "score", "address": "{scorer}"}}]'}
                    if name == "b"
                    else {}
                ),
            )

    def add_server(self, name: str, **settings: object) -> None:
        """A rollout server, on the port that it had before."""
        port = {"port": self[name].port} if name in self.processes else {}
        given = {
            "run_id": RUN_ID,
            "weights": self["weights"].address,
            "server_id": name,
            "fake_vocab_size": 10,
            "fake_step_seconds": 0.02,
            **port,
            **settings,
        }
        self.add(name, "rollout.server", "rollout_server", **given)
        self[name].port = port.get("port", self[name].port)

    def add_trainer(self, num_steps: int, **settings: object) -> None:
        """Add a trainer, which ends after `num_steps` optimizer steps of the run."""
        self.add(
            "trainer",
            "trainer",
            "trainer",
            run_id=RUN_ID,
            model=self._folder / "model",
            trajectory_manager=self["trajectory-manager"].address,
            weights=self["weights"].address,
            num_steps=num_steps,
            resume=True,
            checkpoint__folder=self._folder / "checkpoints",
            batch__micro_batch_tokens=64,
            **settings,
        )

    async def start(self, *names: str) -> None:
        """Start processes beside each other."""
        with ThreadPoolExecutor() as threads:
            chosen = [self[name] for name in names]
            await asyncio.to_thread(lambda: list(threads.map(Process.start, chosen)))

    async def kill(self, *names: str) -> None:
        """End processes as a crash would."""
        for name in names:
            await asyncio.to_thread(self[name].kill)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process that runs."""
        process = self[name]._process
        assert process is not None
        process.send_signal(number)

    async def group(self, *, tokens: int = 4, rewards: tuple[object, object] = (0.0, 1.0)) -> None:
        """One group of two rollouts, through the gateway, whatever it takes."""
        self._number += 1
        name = f"g{self._number}"
        async with Client(self["rollout-gateway"].address, run_id=RUN_ID) as client:
            for member, reward in enumerate(rewards):
                rollout = await client.start_rollout(f"{name}-{member}", group=(name, 2))
                sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
                await rollout.generate([{"role": "user", "content": "word"}], sampling)
                await rollout.finish(reward)  # type: ignore[arg-type]

    async def mistaken_calls(self) -> None:
        """A call of each service that it refuses, and one over HTTP: what a healthy run has too."""
        for name, method in _REFUSED.items():
            async with grpc.aio.insecure_channel(self[name].address) as channel:
                with suppress(grpc.aio.AioRpcError):
                    await channel.unary_unary(f"/seamflow.{method}")(b"")  # type: ignore[arg-type]
        url = f"http://127.0.0.1:{self.http_port}/rollouts"
        async with aiohttp.ClientSession() as session, session.post(url, json={}):
            pass

    async def create_run(self, run_id: str = RUN_ID) -> None:
        """A run whose steps have two groups."""
        config = trajectory_pb2.RunConfig(
            group_size=2,
            groups_per_step=2,
            max_staleness=64,
            staleness_policy=trajectory_pb2.STALENESS_POLICY_MASK,
            lease_duration=Duration(seconds=60),
            zero_variance_reward="reward",
            durability=trajectory_pb2.DURABILITY_FAST,
        )
        async with connect(self["trajectory-manager"].address) as channel:
            stub = async_stub(RunServiceStub, channel)
            await stub.CreateRun(run_pb.CreateRunRequest(run_id=run_id, config=config))

    @asynccontextmanager
    async def playing(self, pause: float = 0.5, **group: object) -> AsyncIterator[None]:
        """Agents play groups while the block runs."""

        async def play() -> None:
            while True:
                await self.group(**group)  # type: ignore[arg-type]
                await asyncio.sleep(pause)

        async with asyncio.TaskGroup() as tasks:
            players = [tasks.create_task(play()) for _ in range(2)]
            try:
                yield
            finally:
                for player in players:
                    player.cancel()


@asynccontextmanager
async def alert_rig(folder: Path, num_steps: int = HEALTHY_STEPS) -> AsyncIterator[AlertRig]:
    """Start all processes, with a trainer of `num_steps` steps; all end with the context."""
    make_model(folder / "model", _WORDS, seed=0)
    rig = AlertRig(folder)
    rig.redis.start()
    try:
        async with Workers(name="scorer").serving() as scorer:
            rig.add_all(scorer)
            rig.add_trainer(num_steps)
            await rig.start("trajectory-manager")
            await rig.create_run()
            await rig.start(*(name for name in rig.processes if name != "trajectory-manager"))
            yield rig
    finally:
        for process in rig.processes.values():
            with suppress(Exception):
                await asyncio.to_thread(process.kill)
        rig.redis.kill()
