"""Single faults of single processes, drawn at random."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random

from services.launcher.child_process import ProcessPlan
from services.launcher.supervisor import Supervisor

KINDS = ("freeze", "kill", "restart")
_WEIGHTS = (2, 2, 1)
_FREEZE_SECONDS = (5.0, 20.0)


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to which process."""

    kind: str
    """freeze: SIGSTOP for a while; kill: SIGKILL; restart: SIGTERM, and started again."""
    process: str
    seconds: float
    """Of a freeze."""


def draw(random: Random, processes: Sequence[str]) -> Fault:
    """The next fault."""
    kind = random.choices(KINDS, _WEIGHTS)[0]
    return Fault(kind, random.choice(processes), random.uniform(*_FREEZE_SECONDS))


class FaultySupervisor(Supervisor):
    """Children that faults can be done to."""

    def pids(self) -> dict[str, int]:
        """Process ids by name, of what runs."""
        return {name: child.pid for name, child in self._children.items() if child.is_running}

    async def do(self, fault: Fault, plan: ProcessPlan) -> None:
        """Returns when the fault is over; a killed process is started again by its watcher."""
        if fault.kind == "kill":
            self.kill(fault.process)
        elif fault.kind == "restart":
            await self.stop(fault.process)
            await self.start(plan)
        else:
            await self.freeze(fault.process, fault.seconds)

    async def freeze(self, name: str, seconds: float) -> None:
        """Stop all threads of its process group, and let them go on later."""
        group = self.pids().get(name)
        if group is None:  # it is being started
            return
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGCONT)
