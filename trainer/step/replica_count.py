"""How many copies of the models train: changed between two steps, by the scheduler or an operator.

A copy, on one rank or sharded over several, is a data-parallel unit. StreamRL (arXiv 2504.15930)
moves such units between training and generation while a run goes on. The ranks of a copy that does
not train wait without models, so that a rollout server can use their nodes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from services.chassis.log import get_logger
from trainer.clients.node_client import NodeClient
from trainer.ranks.device_lease import DeviceLease
from trainer.ranks.rank_group import RankGroup


class ReplicaCount:
    """The number that is wanted, and the change to it."""

    def __init__(self, ranks: RankGroup, device: DeviceLease, nodes: NodeClient) -> None:
        self._ranks, self._device, self._nodes = ranks, device, nodes
        self._wanted = ranks.rank0.max_replicas
        self._unit = nodes_of_unit(ranks) if nodes.has_scheduler else 0
        self._advice = 0
        if self._unit:
            nodes.offer(self._unit, self._unit * ranks.rank0.max_replicas)

    def want(self, replicas: int) -> None:
        """Set the number of copies, from the next step on.

        Raises:
            ValueError: none, or more than the ranks can hold.
        """
        most = self._ranks.rank0.max_replicas
        if not 1 <= replicas <= most:
            raise ValueError(f"give 1 to {most}, the trainer.replicas that it started with")
        self._wanted = replicas

    async def follow(self, settle: Callable[[], Awaitable[None]]) -> None:
        """Between two steps: let ranks join or leave, if another number is wanted.

        Args:
            settle: waits until nothing reads the weights in the background.
        """
        self._take_advice()
        before, wanted = self._ranks.rank0.wanted_replicas, self._wanted
        if wanted == before:
            return
        await settle()
        if self._unit and wanted > before:  # devices must be free before models are loaded on them
            await self._need(wanted)
        async with self._device.use(self._nodes.acquire):
            is_done = await self._ranks.resize(wanted)
        if self._unit and wanted < before:  # and the models gone before others use them
            await self._need(wanted)
            await self._nodes.acquire()
        get_logger().info("replicas_changed", before=before, wanted=wanted, is_done=is_done)

    def _take_advice(self) -> None:
        advice = self._nodes.advised_nodes
        if self._unit and advice not in (0, self._advice):
            self._advice = advice
            self._wanted = min(max(advice // self._unit, 1), self._ranks.rank0.max_replicas)

    async def _need(self, replicas: int) -> None:
        names = self._ranks.rank0.nodes_of(replicas)
        await self._device.need(names)
        self._nodes.need(names)


def nodes_of_unit(ranks: RankGroup) -> int:
    """Nodes of one copy of the models; 0: some have no name, or copies share a node."""
    rank0, most = ranks.rank0, ranks.rank0.max_replicas
    names = rank0.nodes_of(most)
    unit, rest = divmod(len(set(names)), most)
    copies = range(1, most + 1)
    apart = all(len(set(rank0.nodes_of(copy))) == copy * unit for copy in copies)
    return unit if apart and not rest and "" not in names and most > 1 else 0
