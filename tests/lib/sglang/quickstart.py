"""The quickstart's whole loop as the launcher runs it, with something done beside it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from seamflow.channel import connect
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from services.chassis.config.load import load
from services.launcher import redis_server
from services.launcher.child_process import ProcessPlan
from services.launcher.config import LauncherConfig
from services.launcher.layout import Layout, free_ports
from services.launcher.process_plan import plan
from services.launcher.report.view import View
from services.launcher.run import Run
from tests.lib.end_to_end.support import Process
from tests.lib.redis_server import RedisServer

CONFIG = Path(__file__).parents[3] / "examples/quickstart/sglang.toml"
LEASED = "leased.jsonl"
_PAGE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Quickstart:
    """One run of it on this machine."""

    config: LauncherConfig
    layout: Layout

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return self.layout.folder

    @property
    def token_log(self) -> Path:
        """What the agents received, written by them."""
        return self.folder / "received.jsonl"

    @property
    def leased(self) -> Path:
        """What the trainer leased, written by it: see `recording_trainer`."""
        return self.folder / LEASED

    def weights(self, version: int) -> Path:
        """The published folder of `version`; 0 is the model the run started from."""
        if version == 0:
            return self.folder / "prepared" / "model"
        name = f"weight_v{version:06d}"
        return self.folder / "weights" / self.layout.run_id / "policy" / name

    async def train(self) -> dict[str, Any]:
        """From the first process to the last; returns the launcher's summary."""
        return await Run(self.config, self.layout, self._plans(), View()).train()

    async def train_beside(self, work: Callable[[], Awaitable[None]]) -> None:
        """Train until `work` is done; then end every process, as Ctrl-C does."""
        training = asyncio.create_task(self._train_until_stopped())
        working = asyncio.ensure_future(work())
        done, _ = await asyncio.wait({training, working}, return_when=asyncio.FIRST_COMPLETED)
        if training in done:
            working.cancel()
            pytest.fail(f"training ended before its time, see {self.folder}/logs")
        os.kill(os.getpid(), signal.SIGTERM)
        await training
        await working

    async def _train_until_stopped(self) -> None:
        with suppress(KeyboardInterrupt):  # what the launcher raises once all have ended
            await self.train()

    def _plans(self) -> dict[str, ProcessPlan]:
        redis = redis_server.server_plan(self.config, self.folder, self.layout.ports["redis"])
        plans = {"redis": redis, **plan(self.config, self.layout)}
        trainer = plans["trainer"]
        command = (
            trainer.command[0],
            "-m",
            "tests.lib.sglang.recording_trainer",
            *trainer.command[3:],
        )
        return {**plans, "trainer": replace(trainer, command=command)}


def make_quickstart(folder: Path, *flags: str) -> Quickstart:
    """A run in `folder`; `flags` are the launcher's."""
    name = ("--name", folder.name, "--runs-folder", str(folder.parent))
    config = load(LauncherConfig, "launcher", ["--config", str(CONFIG), *name, *flags])
    ports = free_ports(config)
    layout = Layout(
        folder=folder,
        run_id=config.name,
        config_file=CONFIG,
        ports=ports,
        redis_url=f"redis://127.0.0.1:{ports['redis']}",
    )
    folder.mkdir(parents=True, exist_ok=True)
    return Quickstart(config=config, layout=layout)


async def stored_trajectories(run: Quickstart) -> list[trajectory_pb2.Trajectory]:
    """Everything a run recorded, read by a new manager from what the store left on disk."""
    redis = RedisServer(run.folder / "redis")
    manager = Process(
        "trajectory_manager", "trajectory_manager", run.folder / "logs", redis_url=redis.url
    )
    redis.start()
    try:
        with manager:
            return await _all(manager.address, run.layout.run_id)
    finally:
        redis.stop()


async def _all(address: str, run_id: str) -> list[trajectory_pb2.Trajectory]:
    found: list[trajectory_pb2.Trajectory] = []
    request = pb.ListTrajectoriesRequest(run_id=run_id, page_size=_PAGE)
    async with connect(address) as channel:
        stub = async_stub(TrajectoryServiceStub, channel)
        while True:
            page = await stub.ListTrajectories(request)
            found += page.trajectories
            request.page_token = page.next_page_token
            if not request.page_token:
                return found
