"""The quickstart's loop with lending, for hours, while a process at a time has a fault."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, cast

from seamflow.enum_names import enum_name
from seamflow.pages import pages
from seamflow.trajectory.v1 import task_service_pb2 as task_pb
from seamflow.trajectory.v1.trajectory_pb2 import Trajectory

from services.launcher.report.summary import audit, read_token_log, trajectories
from services.launcher.service_clients import Services
from services.launcher.supervisor import Supervisor
from tests.chaos.soak.faults import FaultySupervisor, draw
from tests.chaos.soak.memory import append, measured
from tests.suites.mixed.mixed_run import MixedRun

LEAK = "leak"
"""A child that grows on purpose, to show that growth is seen."""
_LOOK_SECONDS = 10.0


@dataclass(slots=True, kw_only=True)
class SoakRun(MixedRun):
    """Training that goes on through faults."""

    seconds: float
    """How long faults go on."""
    every_seconds: float
    """Least time between the beginnings of two faults; each is over before the next one."""
    seed: int
    never_thawed: str | None = None
    """Control: this process is stopped and stays so."""
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    """Every fault, with the seconds until further steps were committed; None: not in time."""

    async def _learn(self, processes: Supervisor, services: Services) -> None:
        """Start training, do the faults, and let the trainer finish."""
        faulty = cast(FaultySupervisor, processes)
        await processes.start(self._plan("dataloader"))
        self.view.phase("training: waiting for the first steps")
        await self._within_bound("all processes", self._steps_follow(services))
        watching = asyncio.create_task(self._measure(faulty))
        try:
            await self._do_faults(faulty, services)
        finally:
            watching.cancel()
        await self._finish(processes, services)

    async def _do_faults(self, processes: FaultySupervisor, services: Services) -> None:
        random, end = Random(self.seed), time.monotonic() + self.seconds
        if self.never_thawed is not None:
            async with asyncio.TaskGroup() as tasks:
                freeze = processes.freeze(self.never_thawed, 2 * self.bound_seconds)
                frozen = tasks.create_task(freeze)
                await self._recover({"process": self.never_thawed}, services)
                frozen.cancel()
        while time.monotonic() < end:
            began = time.monotonic()
            fault = draw(random, list(self.plans))
            self.view.phase(f"{len(self.recoveries) + 1}: {fault.kind} {fault.process}")
            await processes.do(fault, self.plans[fault.process])
            await self._recover(asdict(fault), services)
            await asyncio.sleep(max(0.0, self.every_seconds - (time.monotonic() - began)))

    async def _recover(self, fault: dict[str, Any], services: Services) -> None:
        began, seconds = time.monotonic(), None
        with suppress(TimeoutError):
            async with asyncio.timeout(self.bound_seconds):
                await self._steps_follow(services)
                seconds = time.monotonic() - began
        self.recoveries.append({**fault, "at": time.time(), "recovery_seconds": seconds})
        with (self.layout.folder / "faults.jsonl").open("a") as out:
            out.write(json.dumps(self.recoveries[-1]) + "\n")

    async def _measure(self, processes: FaultySupervisor) -> None:
        """Write what each process uses, and the launcher of this run; never returns."""
        leak = await _leaking()
        try:
            while True:
                pids = {**processes.pids(), "launcher": os.getpid(), LEAK: leak.pid}
                looks = [measured(name, pid, time.time()) for name, pid in pids.items()]
                append(self.memory_file, (look for look in looks if look is not None))
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            leak.kill()
            await leak.wait()

    async def _summarize(self, processes: Supervisor, services: Services) -> dict[str, Any]:
        """The summary, and whether the audit sees one changed token and one doubled one."""
        summary = await MixedRun._summarize(self, processes, services)
        stored = [trajectory async for trajectory in trajectories(services)]
        log = self.layout.folder / "received.jsonl"
        letters = Counter([reason async for reason in _dead_letters(services)])
        return {**summary, "audit_sees": _seen(log, stored), "dead_letters": letters}

    @property
    def memory_file(self) -> Path:
        """Looks at the processes, a JSON line each."""
        return self.layout.folder / "memory.jsonl"


async def _leaking() -> asyncio.subprocess.Process:
    """A process that takes about 100 MiB per hour."""
    code = (
        "import time\nkept = []\n"
        "while True:\n    kept.append(bytearray(b'x') * 29_000)\n    time.sleep(1)"
    )
    command = (sys.executable, "-c", code)
    return await asyncio.create_subprocess_exec(*command, start_new_session=True)


async def _dead_letters(services: Services) -> AsyncIterator[str]:
    """The reason of each group that left without being trained."""
    request = task_pb.ListDeadLettersRequest(run_id=services.run_id)
    async for page in pages(services.tasks.ListDeadLetters, request):
        for letter in page.dead_letters:
            yield enum_name(task_pb.DeadLetterReason, letter.reason).lower()


def _seen(log: Path, stored: Sequence[Trajectory]) -> bool:
    """Control: with a token that the store does not have, and one that came twice."""
    plain, received = audit(read_token_log(log), stored), read_token_log(log)
    first, *_, last = (tokens for turn in received.values() for tokens in turn.values())
    first[0] = replace(first[0], token_id=first[0].token_id + 1)
    last.append(last[0])
    changed = audit(received, stored)
    return (changed.num_lost, changed.num_duplicated) == (
        plain.num_lost + 1,
        plain.num_duplicated + 1,
    )
