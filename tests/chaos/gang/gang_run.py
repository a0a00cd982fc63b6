"""A trainer of two nodes, with a spare, whose nodes are lent, returned and killed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import cast

from seamflow.retry import retrying
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb

from services.launcher.service_clients import Services
from services.launcher.supervisor import Supervisor
from tests.suites.mixed.mixed_run import MixedRun

_LOOK_SECONDS = 0.02
_KILL_SECONDS = (2.0, 8.0)
_TRAINING = trainer_pb.TRAINER_STATE_TRAINING
_HELD = (server_pb.SERVER_STATE_SERVING, server_pb.SERVER_STATE_PAUSED)


class NodeKiller(Supervisor):
    """Children that can be killed without being started again."""

    async def kill_for_good(self, *names: str) -> None:
        """SIGKILL these; `start` brings one back."""
        for name in names:
            self._watchers.pop(name).cancel()
            child = self._children.pop(name)
            child.kill()
            await child.wait()


@dataclass(slots=True, kw_only=True)
class GangRun(MixedRun):
    """Training that goes on while processes of its nodes are killed."""

    num_events: int
    """Lendings, returns and kills together."""
    seed: int
    kills_nodes: bool = True
    """Whether nodes are killed, or only lent and returned."""
    kills: Counter[str] = field(default_factory=Counter)
    """By what was killed."""
    recovery_seconds: list[float] = field(default_factory=list)
    """After each kill, until further steps were committed."""
    num_looks: int = 0
    """Looks at a node of a rank while it trained."""
    num_without_device: int = 0
    """Of these, those in which the node's rollout server had the device."""
    placements: set[tuple[str, ...]] = field(default_factory=set)
    """Nodes that the ranks were seen on."""

    async def _learn(self, processes: Supervisor, services: Services) -> None:
        """Start training, kill nodes, and let the trainer finish."""
        await processes.start(self._plan("dataloader"))
        self.view.phase("training: waiting for the first steps")
        await self._within_bound("all processes", self._steps_follow(services))
        watching = asyncio.create_task(self._look(services))
        try:
            await self._kill_nodes(processes, services)
        finally:
            watching.cancel()
        await self._finish(processes, services)

    async def _kill_nodes(self, processes: Supervisor, services: Services) -> None:
        random = Random(self.seed)
        while (done := self._num_events()) < self.num_events:
            await asyncio.sleep(random.uniform(*_KILL_SECONDS))
            if not self.kills_nodes:
                continue
            what = random.choice(("node", "trainer", "node_agent"))
            node = random.choice(await self._rank_nodes(services))
            self.view.phase(f"{done} of {self.num_events} events: kill {what} of {node}")
            self.kills[what] += 1
            names, began = _processes(what, node), time.monotonic()
            await cast(NodeKiller, processes).kill_for_good(*names)
            if what != "node":  # a dead node stays away until the spare has taken its place
                await self._start(processes, names)
            await self._within_bound(f"{what} of {node}", self._steps_follow(services))
            self.recovery_seconds.append(time.monotonic() - began)
            if what == "node":
                await self._start(processes, names)

    async def _start(self, processes: Supervisor, names: Sequence[str]) -> None:
        for name in names:
            await processes.start(self.plans[name])

    async def _rank_nodes(self, services: Services) -> list[str]:
        while (status := await services.trainer_status()) is None or not status.rank_nodes:
            await asyncio.sleep(_LOOK_SECONDS)
        return list(status.rank_nodes)

    async def _finish(self, processes: Supervisor, services: Services) -> None:
        """Make the step in progress the last one."""
        request = trainer_pb.FinishTrainingRequest()
        await retrying(lambda: services.trainer.FinishTraining(request))
        await self._within_bound("the last step", self._finished(processes, services))

    def _num_events(self) -> int:
        return self.watch.moves.num_lent + self.watch.moves.num_returned + self.kills.total()

    async def _look(self, services: Services) -> None:
        """Look at the nodes of the ranks in each training step; never returns.

        A server that has the device between two answers of a trainer in the same step had it while
        the ranks trained.
        """
        while True:
            before = await services.trainer_status()
            if before is not None and before.state == _TRAINING:
                nodes = tuple(before.rank_nodes)
                servers = (await services.snapshot()).answering_servers
                infos = [servers.get(node) for node in nodes]
                after = await services.trainer_status()
                if after is not None and (after.state, after.step) == (_TRAINING, before.step):
                    self.placements.add(nodes)
                    self.num_looks += len(infos)
                    self.num_without_device += sum(
                        info is not None and info.state in _HELD for info in infos
                    )
            await asyncio.sleep(_LOOK_SECONDS)


def _processes(what: str, node: str) -> list[str]:
    kinds = ("trainer", "node_agent", "rollout_server") if what == "node" else (what,)
    return [f"{kind}-{node}" for kind in kinds]
