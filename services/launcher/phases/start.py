"""The start of a run: from its first process until agents can work."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from seamflow.errors import ConflictError, NotFoundError
from seamflow.retry import retrying
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trajectory.v1 import run_service_pb2 as run_pb

from services.chassis.errors import ConfigError, DependencyUnavailable
from services.launcher import redis_server
from services.launcher.child_process import ProcessPlan
from services.launcher.config import LauncherConfig
from services.launcher.layout import Layout, console_link, instructions
from services.launcher.report.view import View
from services.launcher.run_rules import rules
from services.launcher.same_run import check_same_store, note_beginning, note_creation
from services.launcher.service_clients import Services
from services.launcher.supervisor import Supervisor, child_environment
from services.lib.child_process import Child

CORE_SERVICES = ("trajectory_manager", "weights", "scheduler")
"""Started first."""
LATER = ("evaluator", "dataloader")
"""Started by later phases."""
_AGENTS = ("agent", "agent_runner")
_REFRESH_SECONDS = 0.5
_POLL_SECONDS = 0.1
_PREPARE_END_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Start:
    """Starts all processes but the evaluator and the dataloader, and creates the run."""

    config: LauncherConfig
    layout: Layout
    plans: Mapping[str, ProcessPlan]
    view: View
    accepts_lost_samples: bool = False

    async def core_services(self, processes: Supervisor) -> None:
        """Start the store, and the services that need nothing else."""
        self.view.phase("starting services")
        if "redis" in self.plans:
            (self.layout.folder / "redis").mkdir(exist_ok=True)
            await processes.start(self.plans["redis"])
        await redis_server.wait_for_store(self.layout.redis_url)
        for name in CORE_SERVICES:
            await processes.start(self.plans[name])

    async def prepare(self) -> None:
        """Make model and tasks, unless an interrupted run has already done so.

        What the module prints is for a terminal; elsewhere it goes to a log, as an output that is
        closed or full would end the module.

        Raises:
            DependencyUnavailable: the module that makes them failed.
        """
        marker = self.layout.prepared_marker
        if self.config.prepare is None or marker.is_file():
            return
        self.view.phase(f"preparing: {self.config.prepare}")
        command = [sys.executable, "-m", "seamflow.user_code.user_modules", self.config.prepare]
        command += ["--out", str(marker.parent), "--seed", str(self.config.seed)]
        log = None if sys.stdout.isatty() else self.layout.logs() / "prepare.log"
        child = await Child.start(command, child_environment({}), log)
        try:
            code = await child.wait()
        except asyncio.CancelledError:
            await child.end(_PREPARE_END_SECONDS)
            raise
        if code != 0:
            said = "" if log is None else f"; see {log}"
            what = f"{self.config.prepare} exited with code {code}{said}"
            raise DependencyUnavailable("prepare", what)
        marker.touch()
        note_beginning(self.config, self.layout)

    async def create_run(self, services: Services) -> None:
        """Create the run, or find that it exists with the same rules.

        Raises:
            ConfigError: it exists with others, in a Redis that other launchers use too, or the
                store has lost it, and `accepts_lost_samples` is not set.
        """
        await self._wait_for_manager()
        if not self.accepts_lost_samples:
            check_same_store(self.config, self.layout, await self._created_at(services))
        config = self.config.replace(required_columns=self.config.columns)
        request = run_pb.CreateRunRequest(run_id=self.layout.run_id, config=rules(config))
        try:
            await retrying(lambda: services.runs.CreateRun(request))
        except ConflictError as error:
            cure = "set them back, or start a new run by another --name"
            raise ConfigError(f"{error}: {cure}") from error
        note_creation(self.layout, await self._created_at(services))

    async def _created_at(self, services: Services) -> str:
        """When the store has created the run; empty: it has not."""
        request = run_pb.GetRunRequest(run_id=self.layout.run_id)
        try:
            return (
                await retrying(lambda: services.runs.GetRun(request))
            ).run.create_time.ToJsonString()
        except NotFoundError:
            return ""

    async def others(self, processes: Supervisor, services: Services) -> None:
        """Start what computes, then the agents."""
        self.view.phase("loading the model in rollout servers and trainer")
        here = [name for name, each in self.plans.items() if not each.host]
        others = [name for name in here if name not in ("redis", *LATER, *CORE_SERVICES)]
        for name in others:
            if name not in _AGENTS:
                await processes.start(self.plans[name])
        if "console" in self.plans:
            self.view.note(f"console: {console_link(self.layout)}")
        await self._wait_until_run_goes_on(services)
        for name in filter(_AGENTS.__contains__, others):
            await processes.start(self.plans[name])
        if self.config.are_agents_outside:
            self.view.note(instructions(self.config, self.layout))

    async def _wait_until_run_goes_on(self, services: Services) -> None:
        """Give a resumed run its nodes back, and wait until its trainer has started it again.

        A run that had ended has drained its nodes, and agents would leave it at once.
        """
        for node in await services.nodes():
            request = scheduler_pb.DrainNodeRequest(node_id=node.node_id, drain=False)
            await retrying(lambda request=request: services.scheduler.DrainNode(request))  # type: ignore[misc]
        get = run_pb.GetRunRequest(run_id=self.layout.run_id)
        while any(name.partition("-")[0] == "trainer" for name in self.plans) and (
            (await retrying(lambda: services.runs.GetRun(get))).run.HasField("end_time")
        ):
            status = await services.trainer_status()
            if status is not None and status.state == trainer_pb.TRAINER_STATE_FINISHED:
                return
            await asyncio.sleep(_REFRESH_SECONDS)

    async def _wait_for_manager(self) -> None:
        """A refused connection is no news while the process starts."""
        host, _, port = self.layout.address("trajectory_manager").rpartition(":")
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
                return
            await asyncio.sleep(_POLL_SECONDS)
