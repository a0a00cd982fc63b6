"""Many emulated nodes in few processes: real rollout servers on emulated engines, and node agents.

    python -m bench.sim.emulation.nodes servers settings.json
    python -m bench.sim.emulation.nodes agents settings.json

Two processes, so that what the control plane costs (the agents) is apart from what is emulated.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from rollout.server.cli import build as build_server
from rollout.server.config import RolloutServerConfig
from services.chassis import log
from services.chassis.rpc.server import started
from services.node_agent.cli import build as build_agent
from services.node_agent.config import NodeAgentConfig

"""Of this machine: more often than by default, as emulated time passes faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesSettings:
    """What both processes are told, as a JSON file."""

    run_id: str
    """Training job."""
    model: str
    """Folder with emulation.json, and for what they write."""
    slots: int
    """Of each engine."""
    weights: str
    """Address."""
    scheduler: str
    """Address."""
    trainer: str
    """Address; nodes with the tag train are moved through it."""
    nodes: dict[str, list[str]]
    """Node -> capability tags."""

    def write(self, file: Path) -> None:
        """For `main`."""
        file.write_text(json.dumps(asdict(self)))


def ready_file(settings: NodesSettings, part: str) -> Path:
    """Exists once all of a part's services do; "servers": node -> port."""
    return Path(settings.model) / f"{part}.ready.json"


async def _serve(settings: NodesSettings) -> None:
    ports = {}
    async with AsyncExitStack() as stack:
        for node_id, tags in settings.nodes.items():
            if "rollout" in tags:
                config = _server_config(node_id, settings)
                service = await stack.enter_async_context(build_server(config))
                ports[node_id] = await stack.enter_async_context(started(service, config))
        await _until_stopped(ready_file(settings, "servers"), json.dumps(ports))


async def _agree(settings: NodesSettings) -> None:
    ports = json.loads(ready_file(settings, "servers").read_text())
    async with AsyncExitStack() as stack:
        for node_id, tags in settings.nodes.items():
            config = _agent_config(node_id, tags, ports, settings)
            service = await stack.enter_async_context(build_agent(config))
            await stack.enter_async_context(started(service, config))
        await _until_stopped(ready_file(settings, "agents"), "{}")


def _server_config(node_id: str, settings: NodesSettings) -> RolloutServerConfig:
    return RolloutServerConfig(
        port=0,
        admin_port=-1,
        log_level="warning",
        drain_seconds=0.1,
        engine="bench.sim.emulation.engine:build",
        model=Path(settings.model),
        run_id=settings.run_id,
        weights=settings.weights,
        server_id=node_id,
        max_running=settings.slots,
    )


def _agent_config(
    node_id: str, tags: list[str], ports: dict[str, int], settings: NodesSettings
) -> NodeAgentConfig:
    return NodeAgentConfig(
        port=0,
        admin_port=-1,
        log_level="warning",
        drain_seconds=0.1,
        node_id=node_id,
        run_id=settings.run_id,
        capability_tags=tuple(tags),
        scheduler=settings.scheduler,
        rollout_server=f"127.0.0.1:{ports[node_id]}" if node_id in ports else None,
        trainer=settings.trainer if "train" in tags else None,
    )


async def _until_stopped(ready: Path, content: str) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    partial = ready.with_suffix(".part")
    partial.write_text(content)
    partial.rename(ready)
    await stop.wait()


def main() -> None:
    """Serve one part of the nodes until a signal."""
    part, file = sys.argv[1:]
    settings = NodesSettings(**json.loads(Path(file).read_text()))
    log.configure(_server_config("log", settings), f"emulated_{part}")
    uvloop.run({"servers": _serve, "agents": _agree}[part](settings))


if __name__ == "__main__":
    main()
