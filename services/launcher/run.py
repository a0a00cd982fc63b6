"""A training run, from the first process to the summary."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seamflow.cli.run_files import read_steps
from seamflow.errors import ConflictError
from seamflow.retry import retrying
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trajectory.v1 import run_service_pb2 as run_pb

from services.chassis.errors import ConfigError, DependencyUnavailable
from services.launcher.agent_access import LeaseHint, instructions
from services.launcher.checks.health_notes import HealthNotes
from services.launcher.checks.run_folder import watch_folder
from services.launcher.child_process import ProcessPlan
from services.launcher.config import LauncherConfig
from services.launcher.evaluation.evaluation_config import EvaluationConfig
from services.launcher.evaluation.evaluation_log import EvaluationLine
from services.launcher.evaluation.evaluator import Evaluator
from services.launcher.evaluation.heldout import trajectories
from services.launcher.layout import Layout
from services.launcher.redis import redis_server
from services.launcher.report import plots
from services.launcher.report.alarm_notes import AlarmNotes
from services.launcher.report.failure_notes import FailureNotes
from services.launcher.report.learned import failure_lines, learned
from services.launcher.report.occupancy import CoresBusy, Occupancy
from services.launcher.report.ready_notes import ReadyNotes
from services.launcher.report.summary import (
    Lendings,
    TrajectoryFigures,
    num_weight_updates,
    package_versions,
    tail_ratio,
)
from services.launcher.report.token_audit import audit_figures
from services.launcher.run_until_failure import run_until_failure
from services.launcher.same_run.run_rules import rules
from services.launcher.service_clients import Services, connected
from services.launcher.supervisor import Supervisor, child_environment
from services.launcher.training import Training
from services.launcher.view import View
from services.lib.child_process import Child

__all__ = ["Run"]

_AGENTS = ("agent", "agent_runner")
CORE_SERVICES = ("trajectory_manager", "weights", "scheduler")
_REFRESH_SECONDS = 0.5
_AGENT_END_SECONDS = 10.0
_AGENT_POLL_SECONDS = 2.0
_START_POLL_SECONDS = 0.1
_PREPARE_END_SECONDS = 5.0


@dataclass(slots=True)
class Run:
    """One training run on this machine."""

    config: LauncherConfig
    layout: Layout
    plans: dict[str, ProcessPlan]
    view: View
    supervisor: Callable[[Path], Supervisor] = Supervisor
    """Makes the supervisor of the processes, which log to the folder that it is given."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Table [evaluation]."""
    evaluator: Evaluator | None = None
    start: float = field(default_factory=time.monotonic)
    lendings: Lendings = field(default_factory=Lendings)
    occupancy: Occupancy = field(default_factory=Occupancy)
    is_learning: bool = False
    training: Training | None = None
    seconds_learning: float = 0.0
    cores_busy: float = 0.0

    async def train(self) -> dict[str, Any]:
        """Start all processes, train, end them, and return the summary."""
        async with (
            self.supervisor(self._logs()) as processes,
            connected(self.config, self.layout) as services,
        ):
            return await run_until_failure(
                processes, self._train(processes, services), watch_folder(self.layout.folder)
            )

    async def evaluate(self, step: int) -> EvaluationLine:
        """Start all processes, evaluate the model, which is of optimizer step `step`, end them."""
        async with (
            self.supervisor(self._logs()) as processes,
            connected(self.config, self.layout) as services,
        ):
            return await run_until_failure(
                processes,
                self._evaluate(processes, services, step),
                watch_folder(self.layout.folder),
            )

    async def serve(self) -> None:
        """Start all processes and keep them; ends by Ctrl-C, as `KeyboardInterrupt`."""
        async with (
            self.supervisor(self._logs()) as processes,
            connected(self.config, self.layout) as services,
        ):
            await run_until_failure(
                processes, self._serve(processes, services), watch_folder(self.layout.folder)
            )

    async def _train(self, processes: Supervisor, services: Services) -> dict[str, Any]:
        async with self._started(processes, services):
            evaluator = self.evaluator = Evaluator(
                self.evaluation, self.config, self.layout, services, self.view
            )
            await evaluator.before()
            await self._learn(processes, services)
            status = await services.trainer_status()
            has_server = self.training is None or await self.training.some_server_serves()
            if status is not None and has_server:
                await evaluator.after(status.weight_version, status.step)
            await self._end_run(processes, services)
            await self._drain_nodes(services)
        return await self._summarize(processes, services)

    async def _evaluate(
        self, processes: Supervisor, services: Services, step: int
    ) -> EvaluationLine:
        async with self._started(processes, services):
            evaluator = Evaluator(self.evaluation, self.config, self.layout, services, self.view)
            line = await evaluator.only(step)
            await self._end_run(processes, services)
        return line

    async def _serve(self, processes: Supervisor, services: Services) -> None:
        async with self._started(processes, services):
            self.view.phase("serving until Ctrl-C")
            await self._start_training(processes)
            status = await self._training(processes, services).finished()
            self.view.note(f"trained for all {status.num_steps} steps; still serving")
            await asyncio.Event().wait()

    @asynccontextmanager
    async def _started(self, processes: Supervisor, services: Services) -> AsyncIterator[None]:
        """All processes but the dataloader, followed by the view."""
        await self._start_core_services(processes)
        await self._prepare()
        await self._create_run(services)
        watching = asyncio.create_task(self._watch(processes, services))
        following = asyncio.create_task(services.follow_allocations(self.lendings))
        try:
            await self._start_others(processes, services)
            yield
        finally:
            watching.cancel()
            following.cancel()

    async def _start_core_services(self, processes: Supervisor) -> None:
        self.view.phase("starting services")
        if "redis" in self.plans:
            (self.layout.folder / "redis").mkdir(exist_ok=True)
            await processes.start(self.plans["redis"])
        await redis_server.wait_for_store(self.layout.redis_url)
        for name in CORE_SERVICES:
            await processes.start(self.plans[name])

    async def _start_others(self, processes: Supervisor, services: Services) -> None:
        self.view.phase("loading the model in rollout servers and trainer")
        others = [n for n in self.plans if n not in ("redis", "dataloader", *CORE_SERVICES)]
        for name in others:
            if name not in _AGENTS:
                await processes.start(self.plans[name])
        await self._wait_until_run_goes_on(services)
        for name in filter(_AGENTS.__contains__, others):
            await processes.start(self.plans[name])
        if self.config.are_agents_outside:
            self.view.note(instructions(self.config, self.layout))

    async def _wait_until_run_goes_on(self, services: Services) -> None:
        """Give a resumed run its nodes back, and wait until its trainer has started it again.

        A run that had ended has drained its nodes, and agents would leave it at once.
        """
        for node in (await services.snapshot()).nodes:
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

    async def _prepare(self) -> None:
        """Make model and tasks, unless an interrupted run has already done so."""
        marker = self.layout.folder / "prepared" / ".complete"
        if self.config.prepare is None or marker.is_file():
            return
        self.view.phase(f"preparing: {self.config.prepare}")
        command = [sys.executable, "-m", "seamflow.user_code.user_modules", self.config.prepare]
        command += ["--out", str(marker.parent), "--seed", str(self.config.seed)]
        child = await Child.start(command, child_environment({}))
        try:
            code = await child.wait()
        except asyncio.CancelledError:
            await child.end(_PREPARE_END_SECONDS)
            raise
        if code != 0:
            raise DependencyUnavailable("prepare", f"{self.config.prepare} exited with code {code}")
        marker.touch()

    async def _create_run(self, services: Services) -> None:
        await self._wait_for_manager()
        config = self.config.replace(required_columns=self.config.columns)
        request = run_pb.CreateRunRequest(run_id=self.layout.run_id, config=rules(config))
        try:
            await retrying(lambda: services.runs.CreateRun(request))
        except ConflictError as error:  # a Redis that other launchers use, too
            cure = "set them back, or start a new run by another --name"
            raise ConfigError(f"{error}: {cure}") from error

    async def _wait_for_manager(self) -> None:
        """A refused connection is no news while the process starts."""
        host, _, port = self.layout.address("trajectory_manager").rpartition(":")
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
                return
            await asyncio.sleep(_START_POLL_SECONDS)

    async def _end_run(self, processes: Supervisor, services: Services) -> None:
        """End the run, and give agents with programs of their own time to notice it."""
        self.view.phase("ending the run")
        request = run_pb.EndRunRequest(run_id=self.layout.run_id)
        await retrying(lambda: services.runs.EndRun(request))
        if "agent" in self.plans:
            await processes.stop("agent", patience=_AGENT_END_SECONDS)
        elif self.config.are_agents_outside:
            await self._wait_for_rollouts(services)

    async def _wait_for_rollouts(self, services: Services) -> None:
        """Wait for the rollouts of agents from outside, then until they have asked for more."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_AGENT_END_SECONDS):
                ready = (await services.snapshot()).readiness
                while ready is None or ready.num_running_rollouts:
                    await asyncio.sleep(_REFRESH_SECONDS)
                    ready = (await services.snapshot()).readiness
        await asyncio.sleep(_AGENT_POLL_SECONDS)

    async def _learn(self, processes: Supervisor, services: Services) -> None:
        """Submit tasks until the trainer has finished and every server has its last weights."""
        self.view.phase("training")
        self.training = self._training(processes, services)
        began, cores, self.is_learning = time.monotonic(), CoresBusy(), True
        await self._start_training(processes)
        evaluating = asyncio.create_task(self._evaluate_beside())
        try:
            status = await self.training.finished()
            self.seconds_learning, self.cores_busy = time.monotonic() - began, cores.mean()
            self.is_learning = False
            if self.evaluator is not None:
                self.evaluator.ending()
            await evaluating
        finally:
            evaluating.cancel()
        if "dataloader" in self.plans:
            await processes.stop("dataloader")
        await self.training.wait_for_version(status.weight_version)

    def _training(self, processes: Supervisor, services: Services) -> Training:
        return Training(
            config=self.config,
            layout=self.layout,
            view=self.view,
            processes=processes,
            services=services,
        )

    async def _evaluate_beside(self) -> None:
        if self.evaluator is not None:
            await self.evaluator.beside()

    async def _start_training(self, processes: Supervisor) -> None:
        """Submit tasks, unless agents bring their own; tell of settings that no process knows."""
        if "dataloader" in self.plans:
            await processes.start(self.plans["dataloader"])
        for warning in processes.warnings():
            self.view.note(warning)

    async def _drain_nodes(self, services: Services) -> None:
        """Return every lent node before the processes end."""
        snapshot = await services.snapshot()
        for node in snapshot.nodes:
            request = scheduler_pb.DrainNodeRequest(node_id=node.node_id, drain=True)
            await retrying(lambda request=request: services.scheduler.DrainNode(request))  # type: ignore[misc]
        while any(
            node.assignment.epoch != node.reported_epoch or node.assignment.tag
            for node in (await services.snapshot()).nodes
        ):
            await asyncio.sleep(_REFRESH_SECONDS / 5)
        await asyncio.sleep(_REFRESH_SECONDS)  # the change feed's last entries

    async def _watch(self, processes: Supervisor, services: Services) -> None:
        hint = LeaseHint(self._advice(), are_tasks_own=self.config.tasks is None)
        alarms, ready = AlarmNotes(), ReadyNotes()
        health = HealthNotes(self.layout.folder, services)
        failures = FailureNotes(lambda: trajectories(services, headers_only=True))
        while True:
            snapshot = await services.snapshot()
            self.view.show(snapshot)
            if (advice := hint.look(snapshot, time.monotonic())) is not None:
                self.view.note(advice)
            for line in await failures.look(snapshot.readiness):
                self.view.note(f"{line} Logs: {self._logs()}")
            lines = [*ready.look(snapshot), *alarms.look(snapshot.trainer), *processes.waits]
            processes.waits.clear()
            for line in [*lines, *await health.look(snapshot.readiness)]:
                self.view.note(line)
            if self.is_learning:
                self.occupancy.add(snapshot)
            if "agent" in processes.ended:
                processes.ended.remove("agent")
                self.view.note(f"the agent's program has ended: {self._advice()}")
            await asyncio.sleep(_REFRESH_SECONDS)

    def _advice(self) -> str:
        """What to do if no agent works."""
        if self.config.are_agents_outside:
            return "start one with the addresses above"
        if self.config.runs_environment:
            return f"see environment*.log in {self._logs()}"
        name = "agent" if self.config.runner_agent is None else "agent_runner"
        return f"see {self._logs() / name}.log"

    async def _summarize(self, processes: Supervisor, services: Services) -> dict[str, Any]:
        self.view.phase("summarizing")
        if "agent_runner" in self.plans:
            await processes.stop("agent_runner")
        stored = [trajectory async for trajectory in trajectories(services)]
        figures = TrajectoryFigures()
        for trajectory in stored:
            figures.add(trajectory)
        steps = read_steps(self.layout.folder / "metrics.jsonl")
        ranking = await services.ranker_status()
        evaluations = self.evaluator.log if self.evaluator is not None else None
        completed = evaluations.completed if evaluations else ()
        plots.draw_run(self.layout.folder, steps, completed, self.occupancy)
        return {
            "run": self.layout.run_id,
            "seed": self.config.seed,
            **learned(steps, evaluations, self.evaluation, self.seconds_learning),
            "health": await self._health(services),
            "failures": failure_lines(stored),
            "stopped_early": self.evaluator.stopped_early if self.evaluator else "",
            "optimizer_steps": len(steps),
            "weight_updates": num_weight_updates(steps),
            "turns": figures.num_turns,
            "min_turns_per_rollout": figures.min_turns_per_rollout,
            "turns_interrupted": figures.turns_interrupted,
            "turns_resumed": figures.turns_resumed,
            "rollouts": figures.num_rollouts,
            "tokens_recorded": figures.tokens_recorded,
            **audit_figures(self.layout.folder / "received.jsonl", stored),
            "node_lendings": self.lendings.num_lent,
            "node_returns": self.lendings.num_returned,
            "max_staleness_seen": max((step["max_staleness"] for step in steps), default=0),
            "failed_rollouts": figures.failed_rollouts,
            "infrastructure_failures": figures.infrastructure_failures,
            "process_restarts": processes.num_restarts,
            "processes_given_up": ", ".join(processes.given_up),
            "ranker_turns_learned": ranking.num_turns if ranking else None,
            "ranker_recall": round(ranking.recall, 2) if ranking else None,
            "tail_ratio": {
                label or "training": {
                    "per_turn": round(tail_ratio(figures.turn_lengths[label]), 2),
                    "per_rollout": round(tail_ratio(figures.rollout_lengths[label]), 2),
                }
                for label in sorted(figures.turn_lengths)
            },
            "nodes": self.occupancy.shares(),
            "cores_busy": f"{self.cores_busy:.2f} of {os.cpu_count()}",
            "seconds_learning": round(self.seconds_learning, 1),
            "seconds_total": round(time.monotonic() - self.start, 1),
            "versions": package_versions(),
        }

    async def _health(self, services: Services) -> list[str]:
        ready = (await services.snapshot()).readiness
        found = await HealthNotes(self.layout.folder, services).findings(ready)
        return [f"{finding.sentence} {finding.cure}" for finding in found]

    def _logs(self) -> Path:
        folder = self.layout.folder / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder
