"""SIGKILLs of engines in mid-turn, one after the other, while training goes on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random

from rich.progress import track
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb

from services.launcher.service_clients import Services, connected
from tests.lib.sglang.engines import EngineProcess, engine_of
from tests.lib.sglang.quickstart import Quickstart

_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One kill."""

    node: str
    victim: str
    """Which processes: see `EngineProcess.kill`."""
    newest_version: int
    """Published before the kill: what the engine must come back with, at least."""
    log_struck: int
    """Bytes the agents' log had at the kill."""
    log_back: int
    """Bytes it had at the last look before the server took turns again: an engine's whole start
    after the kill, so nothing of the killed one was under way any more."""
    seconds: float
    """From the kill until the server took turns again."""


@dataclass(slots=True)
class Strikes:
    """Kills the engines of a run in turn; each is back before the next one falls."""

    run: Quickstart
    nodes: tuple[str, ...]
    kills: int
    random: Random
    done: list[Strike] = field(default_factory=list)

    async def strike_all(self) -> None:
        """Wait until training has begun, then kill again and again."""
        async with connected(self.run.config, self.run.layout) as services:
            while await _newest_version(services) < 1:
                await asyncio.sleep(_LOOK_SECONDS)
            for number in track(range(self.kills), description="SIGKILL of an engine"):
                node = self.nodes[number % len(self.nodes)]
                self.done.append(await self._strike(services, node))

    async def _strike(self, services: Services, node: str) -> Strike:
        engine = await _busy_engine(services, node)
        newest = await _newest_version(services)
        log_struck, began = self._log_size(), asyncio.get_running_loop().time()
        victim = engine.kill(self.random)
        while engine.main.is_running() or await _serves(services, node):
            await asyncio.sleep(_LOOK_SECONDS)
        log_back, before = log_struck, self._log_size()
        while not await _serves(services, node):
            # As it was before the question: no new engine can have sampled any of it.
            log_back, before = before, self._log_size()
            await asyncio.sleep(_LOOK_SECONDS)
        return Strike(
            node=node,
            victim=victim,
            newest_version=newest,
            log_struck=log_struck,
            log_back=log_back,
            seconds=asyncio.get_running_loop().time() - began,
        )

    def _log_size(self) -> int:
        return self.run.token_log.stat().st_size


async def _busy_engine(services: Services, node: str) -> EngineProcess:
    """The engine of `node`, once it is in the middle of turns."""
    while True:
        info = (await services.snapshot()).answering_servers.get(node)
        engine = engine_of(node)
        if info is not None and info.num_running and engine is not None:
            return engine
        await asyncio.sleep(_LOOK_SECONDS)


async def _serves(services: Services, node: str) -> bool:
    info = (await services.snapshot()).answering_servers.get(node)
    return info is not None and info.state == server_pb.SERVER_STATE_SERVING


async def _newest_version(services: Services) -> int:
    status = await services.trainer_status()
    return status.weight_version if status is not None else 0
