"""A node that leaves a trainer and comes back, by the real scheduler and the trainer's lease."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import pytest
from seamflow.channel import connect

from services.chassis.errors import ServiceError
from tests.lib.scheduler.support import (
    BOTH,
    RUN,
    heartbeat,
    list_nodes,
    register,
    running_scheduler,
)
from trainer.clients.node_client import NodeClient
from trainer.commands import Command, Release
from trainer.ranks.device_lease import DeviceLease
from trainer.ranks.rank_group import RankGroup
from trainer.step.replica_count import ReplicaCount

if TYPE_CHECKING:
    from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceAsyncStub

NODES = ("a", "b")


class Ranks(RankGroup):
    """A rank with a copy of the models on each node."""

    max_replicas = 2
    wanted_replicas = 2

    def __init__(self) -> None:
        self.without_node = False
        self.agents: Agents

    @property
    def rank0(self) -> Any:
        """All that is asked of it."""
        return self

    @property
    def nodes(self) -> tuple[str, ...]:
        """Of the ranks with models."""
        return NODES[: self.wanted_replicas]

    def nodes_of(self, replicas: int) -> tuple[str, ...]:
        """Of the first copies."""
        return NODES[:replicas]

    async def do(self, command: Command) -> list[dict[str, float]]:
        """Move their state."""
        return [{"num_bytes": 8} if isinstance(command, Release) else {} for _ in self.nodes]

    async def resize(self, replicas: int) -> bool:
        """Load models, or drop them."""
        self.without_node |= any(self.agents.serving(name) for name in NODES[:replicas])
        self.wanted_replicas = replicas
        return True


class Agents:
    """The agents of both nodes: what is assigned is suspended or resumed, then reported."""

    def __init__(self, stub: SchedulerServiceAsyncStub, device: DeviceLease, ranks: Ranks) -> None:
        self._stub, self._device, self._ranks = stub, device, ranks
        self._tags: dict[str, str] = {}
        self.with_models = False

    def serving(self, name: str) -> bool:
        """Whether the rollout server of a node has its device."""
        return self._tags.get(name) == "rollout"

    async def run(self, name: str) -> None:
        """Follow the scheduler, for ever."""
        epoch = 0
        while True:
            assignment = (await list_nodes(self._stub))[name].assignment
            if assignment.epoch != epoch and await self._switch(name, assignment):
                epoch = assignment.epoch
            if epoch == assignment.epoch:
                await heartbeat(self._stub, name, epoch)
            await asyncio.sleep(0.01)

    async def _switch(self, name: str, assignment: Any) -> bool:
        if assignment.tag == "rollout":
            await self._device.suspend(assignment.epoch, name)
            self.with_models |= name in self._ranks.nodes and not self._device.suspended
            self._tags[name] = "rollout"
            return True
        self._tags[name] = "train"
        try:
            await self._device.resume(assignment.epoch, name)
        except ServiceError:  # not all nodes are there
            return False
        return True


class Hasty(ReplicaCount):
    """Gives the node away before its models are gone."""

    async def follow(self, settle: Callable[[], Awaitable[None]]) -> None:
        """In the wrong order."""
        await self._need(self._wanted)
        await self._nodes.acquire()
        await asyncio.sleep(0.2)
        await self._ranks.resize(self._wanted)


@pytest.mark.parametrize(("kind", "sizes"), [(ReplicaCount, (1, 2, 1, 2)), (Hasty, (1,))])
async def test_a_rollout_server_never_has_a_node_with_models(
    kind: type[ReplicaCount], sizes: tuple[int, ...]
) -> None:
    """Neither before the models are gone, nor after they come; one that hurries is noticed."""
    async with running_scheduler() as (port, stub), connect(f"127.0.0.1:{port}") as channel:
        ranks, nodes = Ranks(), NodeClient(channel, RUN, "trainer", 2, NODES)
        device = DeviceLease(ranks, 2, NODES)
        ranks.agents = agents = Agents(stub, device, ranks)
        count = kind(ranks, device, nodes)
        for name in NODES:
            await register(stub, name, *BOTH)
        await device.start_suspended()
        async with asyncio.timeout(20):
            playing = [asyncio.create_task(agents.run(name)) for name in NODES]
            async with device.use(nodes.acquire):
                pass
            for replicas in sizes:
                count.want(replicas)
                await count.follow(_nothing)
                async with device.use(nodes.acquire):
                    assert not any(map(agents.serving, NODES[:replicas]))
                while [agents.serving(name) for name in NODES] != [False, replicas == 1]:
                    await asyncio.sleep(0.01)
            for task in playing:
                task.cancel()
        assert agents.with_models == (kind is Hasty)
        assert not ranks.without_node


async def _nothing() -> None:
    """Nothing is in the background."""
