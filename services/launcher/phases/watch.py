"""What is watched from the start of a run to its end, and shown as it comes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from services.launcher.agent_access import LeaseHint
from services.launcher.checks.health_notes import HealthNotes
from services.launcher.config import LauncherConfig
from services.launcher.layout import Layout
from services.launcher.report.alarm_notes import AlarmNotes
from services.launcher.report.failure_notes import FailureNotes
from services.launcher.report.lendings import Lendings, follow_lendings
from services.launcher.report.occupancy import Occupancy
from services.launcher.report.ready_notes import ReadyNotes
from services.launcher.report.trajectories import trajectories
from services.launcher.service_clients import Services
from services.launcher.supervisor import Supervisor
from services.launcher.view import View

_REFRESH_SECONDS = 1.0


@dataclass(slots=True)
class Watch:
    """Looks at all services again and again; what it counts is for the summary."""

    config: LauncherConfig
    layout: Layout
    view: View
    lendings: Lendings = field(default_factory=Lendings)
    """Of nodes that can train."""
    occupancy: Occupancy = field(default_factory=Occupancy)
    """What nodes were at work on while the run learned."""
    is_learning: bool = False
    """Whether occupancy is counted."""

    async def follow(self, processes: Supervisor, services: Services) -> None:
        """Show and count until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look(processes, services))
            group.create_task(follow_lendings(services, self.lendings))

    async def _look(self, processes: Supervisor, services: Services) -> None:
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
                self.view.note(f"{line} Logs: {self.layout.logs()}")
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
            return f"see environment*.log in {self.layout.logs()}"
        name = "agent" if self.config.runner_agent is None else "agent_runner"
        return f"see {self.layout.logs() / name}.log"
