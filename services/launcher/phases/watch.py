"""What is watched from the start of a run to its end, and shown as it comes."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import grpc.aio
from seamflow.inspect.lives import RESTARTED, lives, note, stops
from seamflow.inspect.processes import Process
from seamflow.inspect.run_files import read_steps
from seamflow.inspect.snapshot import Snapshot
from seamflow.inspect.why_stuck import standing_still, waiting
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb

from services.launcher.child_process import ProcessPlan
from services.launcher.config import LauncherConfig
from services.launcher.layout import Layout
from services.launcher.report.mechanisms import NodeMoves
from services.launcher.report.notes import (
    AlarmNotes,
    FailureNotes,
    HealthNotes,
    ReadyNotes,
    WaitNotes,
)
from services.launcher.report.occupancy import Occupancy
from services.launcher.report.summary import dead_letters, trajectories
from services.launcher.report.view import View
from services.launcher.service_clients import Services
from services.launcher.supervisor import Supervisor

_RETRY_SECONDS = 0.5
_LOOK_SECONDS = 1.0
_JUDGE_SECONDS = 0.1
"""A short step may take little longer; nothing is read before a file or a count has changed."""
_STILL_SECONDS = 4.0
"""With the time of two looks at silent services, less than 10 s."""
_WAITING_SECONDS = 30.0


async def follow_nodes(services: Services, moves: NodeMoves) -> None:
    """Count what the scheduler's audit log says, until the scheduler ends or restarts."""
    request = scheduler_pb.WatchAllocationsRequest(
        run_id=services.run_id, after_sequence=moves.sequence
    )
    with suppress(grpc.aio.AioRpcError):  # its log survives a restart
        async for response in services.scheduler.WatchAllocations(request):
            for event in response.events:
                moves.add(event)


@dataclass(slots=True)
class Watch:
    """Looks at all services again and again; what it counts is for the summary."""

    config: LauncherConfig
    layout: Layout
    plans: Mapping[str, ProcessPlan]
    view: View
    moves: NodeMoves = field(default_factory=NodeMoves)
    occupancy: Occupancy = field(default_factory=Occupancy)
    """What nodes were at work on while the run learned."""
    is_created: bool = False
    """Whether the services know the run; before, nothing of it can be asked."""
    is_learning: bool = False
    snapshot: Snapshot = field(default_factory=Snapshot)
    """The newest."""

    async def follow(self, processes: Supervisor, services: Services) -> None:
        """Show and count until cancelled."""
        look = self._look(processes, services)
        follow = partial(follow_nodes, services, self.moves)
        async with asyncio.TaskGroup() as group:
            group.create_task(self.view.repeat("one look at the services", look, _LOOK_SECONDS))
            group.create_task(self.view.repeat("following the nodes", follow, _RETRY_SECONDS))
            judge = self._judge(services)
            group.create_task(self.view.repeat("judging the steps", judge, _JUDGE_SECONDS))

    def _judge(self, services: Services) -> Callable[[], Awaitable[None]]:
        health = HealthNotes(self.layout.folder, services)

        async def judge() -> None:
            for line in await health.look(self.snapshot.readiness):
                self.view.note(line)

        return judge

    def _look(self, processes: Supervisor, services: Services) -> Callable[[], Awaitable[None]]:
        alarms, ready = AlarmNotes(), ReadyNotes()
        waits = WaitNotes(standing_still, _STILL_SECONDS), WaitNotes(waiting, _WAITING_SECONDS)
        failures = FailureNotes(
            lambda: trajectories(services, headers_only=True),
            lambda: dead_letters(services),
            self._settled,
            stops(lives(self.layout.folder)),
        )

        async def look() -> None:
            started = self._processes(processes)
            if not self.is_created:
                snapshot = await services.look(started)
            else:
                snapshot = await services.snapshot(started)
            self.snapshot = snapshot
            self.view.show(snapshot)
            self._note_restarts(processes)
            for line in (line for each in waits for line in each.look(snapshot, time.monotonic())):
                self.view.note(line)
            for line in await failures.look(snapshot.readiness):
                self.view.note(f"{line} Logs: {self.layout.logs()}")
            for line in [*ready.look(snapshot), *alarms.look(snapshot.trainer), *processes.waits]:
                self.view.note(line)
            processes.waits.clear()
            if self.is_learning:
                self.occupancy.add(snapshot)
            if "agent" in processes.ended:
                processes.ended.remove("agent")
                self.view.note(f"the agent's program has ended: {self._advice()}")

        return look

    def _settled(self) -> float:
        """When this life had made a step of its own, repeated ones aside; 0: it is the first."""
        folder = self.layout.folder
        found = lives(folder)
        if len(found) < 2:
            return 0.0
        times = [step["time"] for step in read_steps(folder / "metrics.jsonl")]
        return min((time for time in times if time > found[-1].start), default=math.inf)

    def _note_restarts(self, processes: Supervisor) -> None:
        """Tell of each restart, and record it in the life."""
        for name, reason in processes.restarts:
            note(self.layout.folder, RESTARTED, reason, name=name)
            log = self.layout.logs() / f"{name}.log"
            self.view.note(f"{name} ended by itself ({reason}) and is started again; see {log}")
        processes.restarts.clear()

    def _processes(self, processes: Supervisor) -> list[Process]:
        """Those of this machine, and those of other hosts."""
        elsewhere = (plan for plan in self.plans.values() if plan.host and plan.address)
        others = [Process(name=plan.name, address=plan.address) for plan in elsewhere]
        return processes.running() + others

    def _advice(self) -> str:
        """What to do if no agent works."""
        if self.config.are_agents_outside:
            return "start one with the addresses above"
        if self.config.runs_environment:
            return f"see environment*.log in {self.layout.logs()}"
        name = "agent" if self.config.runner_agent is None else "agent_runner"
        return f"see {self.layout.logs() / name}.log"
