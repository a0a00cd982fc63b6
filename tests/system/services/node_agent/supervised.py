"""Node agents in separate processes, with supervised worker processes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tomllib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from seamflow.processes import procfs

from tests.lib.node_agent.scripted_scheduler import ScriptedScheduler
from tests.lib.redis_server import free_port
from tests.lib.scheduler.support import ROOT, RUN, Process


def as_json(toml: str) -> str:
    """A TOML value as JSON, the form that flags and variables take."""
    return json.dumps(tomllib.loads(f"value = {toml}")["value"])


class Entry(NamedTuple):
    """A line of the workers' journal."""

    name: str
    """Worker."""
    event: str
    """"up", "on", "off", "refused", "hangs" or "ended"."""
    epoch: int
    """Assignment."""
    pid: int
    """Its process."""


class Node:
    """A node agent, its workers by name, and their folder."""

    def __init__(
        self, folder: Path, scheduler_port: int, *, state: str = "state", **traits: str
    ) -> None:
        """Each keyword is a worker, its tag the same; its value holds its traits."""
        self.folder = folder
        self.ports = {name: free_port() for name in traits}
        self.options = dict.fromkeys(traits, "deactivate_seconds = 30, end_seconds = 10")
        self._traits = traits
        self._scheduler_port = scheduler_port
        self.state = state
        self.agent: Process | None = None

    async def start(self) -> None:
        """Start the node agent."""
        workers = [f'{{tag = "{n}", address = "127.0.0.1:{p}"}}' for n, p in self.ports.items()]
        self.agent = Process(
            "services.node_agent",
            self.folder,
            node_id="a",
            run_id=RUN,
            capability_tags=",".join(self.ports),
            scheduler=f"127.0.0.1:{self._scheduler_port}",
            workers=as_json(f"[{', '.join(workers)}]"),
            processes=as_json(f"{{{', '.join(self._process(name) for name in self.ports)}}}"),
            state_folder=self.folder / self.state,
        )
        await self.agent.start()

    async def end_agent(self, number: int) -> int:
        """Send the agent a signal and wait for its exit code."""
        assert self.agent is not None
        return await asyncio.to_thread(self.agent.end, number)

    def journal(self) -> list[Entry]:
        """What the workers did."""
        file = self.folder / "journal"
        lines = file.read_text().splitlines() if file.exists() else []
        return [Entry(n, e, int(epoch), int(p)) for n, e, epoch, p in map(str.split, lines)]

    async def until(self, condition: Callable[[Entry], object]) -> Entry:
        """Wait for an entry of the journal; gives the newest."""
        while not (found := [entry for entry in self.journal() if condition(entry)]):
            await asyncio.sleep(0.02)
        return found[-1]

    async def is_up(self, name: str, *, except_pids: tuple[int, ...] = ()) -> int:
        """Wait until a worker serves; gives its process id."""
        entry = await self.until(
            lambda entry: entry[:2] == (name, "up") and entry.pid not in except_pids
        )
        return entry.pid

    def kill_all(self) -> None:
        """End everything that was ever started, so that a failed test leaves nothing behind."""
        if self.agent is not None and self.agent.popen is not None:
            self.agent.end(9)
        child = self.folder / "child"
        pids = {entry.pid for entry in self.journal()}
        for pid in pids | ({int(child.read_text())} if child.exists() else set()):
            if (process := procfs.read(pid)) is not None and self._started(pid):
                procfs.kill(process.identity)

    def _started(self, pid: int) -> bool:
        """Whether it is of this test: process ids are given out again."""
        with suppress(OSError):
            return str(self.folder) in Path(f"/proc/{pid}/cmdline").read_text()
        return False

    def _process(self, name: str) -> str:
        command = [
            "-m",
            "tests.system.services.node_agent.worker",
            name,
            str(self.ports[name]),
            str(self.folder),
        ]
        words = [sys.executable, *command, *self._traits[name].split()]
        path = os.pathsep.join([str(ROOT / "sdk"), str(ROOT)])
        quoted = ", ".join(f'"{word}"' for word in words)
        return (
            f'{name} = {{command = [{quoted}], address = "127.0.0.1:{self.ports[name]}", '
            f'environment = {{PYTHONPATH = "{path}"}}, {self.options[name]}}}'
        )


@asynccontextmanager
async def scripted_node(
    folder: Path, **traits: str
) -> AsyncIterator[tuple[ScriptedScheduler, Node]]:
    """A scripted scheduler and a node that can be started; nothing of it is left at the end."""
    scheduler = ScriptedScheduler()
    async with scheduler.serving() as port:
        node = Node(folder, port, **traits)
        try:
            yield scheduler, node
        finally:
            node.kill_all()


def is_alive(pid: int) -> bool:
    """Whether a process runs."""
    process = procfs.read(pid)
    return process is not None and not process.is_over
