"""The order of a change of replicas: devices free before models come, models gone before others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from trainer.step.replica_count import ReplicaCount, nodes_of_unit


class FakeRanks:
    """Two copies on two ranks each."""

    max_replicas, wanted_replicas = 2, 2

    def __init__(self, done: list[str], nodes: Sequence[str]) -> None:
        self._done, self._nodes = done, nodes

    @property
    def rank0(self) -> FakeRanks:
        """All that is asked of it."""
        return self

    def nodes_of(self, replicas: int) -> tuple[str, ...]:
        """The node of each rank."""
        return tuple(self._nodes[: 2 * replicas])

    async def resize(self, replicas: int) -> bool:
        """Take the new number."""
        self._done.append(f"resize {replicas}")
        self.wanted_replicas = replicas
        return True


class FakeDevices:
    """Note what is needed, and used."""

    def __init__(self, done: list[str]) -> None:
        self._done = done

    async def need(self, nodes: Sequence[str]) -> None:
        """Of the lease."""
        self._done.append(f"devices of {' '.join(sorted(set(nodes)))}")

    @asynccontextmanager
    async def use(self, acquire: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Ask for the nodes first."""
        await acquire()
        yield


class FakeNodes:
    """A scheduler that advises."""

    def __init__(self, done: list[str], *, has_scheduler: bool = True) -> None:
        self._done, self.has_scheduler, self.advised_nodes = done, has_scheduler, 0
        self.offered: tuple[int, int] | None = None

    def offer(self, unit_nodes: int, max_nodes: int) -> None:
        """Of the client."""
        self.offered = unit_nodes, max_nodes

    def need(self, nodes: Sequence[str]) -> None:
        """Of the client."""
        self._done.append(f"nodes {' '.join(sorted(set(nodes)))}")

    async def acquire(self) -> None:
        """Of the client."""
        self._done.append("request")


class Scene:
    """A count, and what it did."""

    def __init__(self, nodes: Sequence[str] = ("a", "a", "b", "b"), **others: Any) -> None:
        self.done: list[str] = []
        self.ranks, self.nodes = FakeRanks(self.done, nodes), FakeNodes(self.done, **others)
        devices: Any = FakeDevices(self.done)
        ranks: Any = self.ranks
        client: Any = self.nodes
        self.count = ReplicaCount(ranks, devices, client)

    async def follow(self) -> list[str]:
        """What is done before a step."""
        self.done.clear()
        await self.count.follow(self._settle)
        return list(self.done)

    async def _settle(self) -> None:
        self.done.append("settle")


async def test_the_models_leave_a_node_before_it_is_given_away_and_come_when_it_is_free() -> None:
    """By advice of the scheduler, in units of one node."""
    scene = Scene()
    assert scene.nodes.offered == (1, 2)
    assert await scene.follow() == []
    scene.nodes.advised_nodes = 1
    smaller = ["settle", "request", "resize 1", "devices of a", "nodes a", "request"]
    assert await scene.follow() == smaller
    assert await scene.follow() == []
    scene.nodes.advised_nodes = 2
    assert await scene.follow() == ["settle", "devices of a b", "nodes a b", "request", "resize 2"]


async def test_copies_that_share_a_node_change_without_the_scheduler() -> None:
    """An operator asks; no node is given away, and none is offered."""
    for scene in (Scene(("a",) * 4), Scene(("",) * 4), Scene(has_scheduler=False)):
        assert scene.nodes.offered is None
        scene.nodes.advised_nodes = 2
        scene.count.want(1)
        assert await scene.follow() == ["settle", "request", "resize 1"]


async def test_older_advice_does_not_undo_what_an_operator_wants() -> None:
    """Until the scheduler advises another number."""
    scene = Scene()
    scene.nodes.advised_nodes = 2
    await scene.follow()
    scene.count.want(1)
    await scene.follow()
    assert await scene.follow() == []
    assert scene.ranks.wanted_replicas == 1
    scene.nodes.advised_nodes = 4  # more than there are
    await scene.follow()
    assert scene.ranks.wanted_replicas == 2


@pytest.mark.parametrize("replicas", [0, 3])
def test_a_number_that_the_ranks_cannot_have_is_an_error(replicas: int) -> None:
    """It names what is possible."""
    with pytest.raises(ValueError, match="give 1 to 2"):
        Scene().count.want(replicas)


def test_units_are_whole_nodes() -> None:
    """Otherwise a unit that leaves would not free a node."""
    for nodes, unit in (("aabb", 1), ("abcd", 2), ("abab", 0), ("abbc", 0)):
        ranks: Any = FakeRanks([], nodes)
        assert nodes_of_unit(ranks) == unit
