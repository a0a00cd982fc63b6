"""Gangs that ask for nodes, work, and give them back, all along."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from tests.chaos.calls import call_retrying_async
from tests.chaos.scheduler.ledger import Ledger

if TYPE_CHECKING:
    from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceAsyncStub

RUN = "chaos"
_WAIT = Duration(seconds=1)
_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What the gangs of a driver are like."""

    sizes: tuple[int, ...]
    """Numbers of nodes to choose from."""
    work_seconds: tuple[float, float]
    """Least and most time that a gang keeps its nodes."""
    tags: tuple[str, ...] = ("train", "score")
    """Capabilities to choose from."""


class Driver:
    """Plays one gang after the other, as rank 0 of a trainer does.

    A gang whose members changed takes its work over under the new epochs before it goes on.

    Args:
        name: names its gangs.
        scheduler: where nodes are asked for; calls are repeated while it is away.
        ledger: where the work is taken over.
        pace: what the gangs are like.
        random: chooses.
    """

    def __init__(
        self,
        name: str,
        scheduler: SchedulerServiceAsyncStub,
        ledger: Ledger,
        pace: Pace,
        random: Random,
    ) -> None:
        self._name = name
        self._scheduler = scheduler
        self._ledger = ledger
        self._pace = pace
        self._random = random
        self._ending = False

    def end(self) -> None:
        """Begin no gang any more; the last one gives its nodes back as soon as it had them."""
        self._ending = True

    async def run(self) -> None:
        """Play until `end`."""
        number = 0
        while not self._ending:
            await self._play(f"{self._name}-{number}")
            number += 1

    async def _play(self, gang: str) -> None:
        request = pb.RequestNodesRequest(
            run_id=RUN,
            gang_id=gang,
            tag=self._random.choice(self._pace.tags),
            num_nodes=self._random.choice(self._pace.sizes),
            wait=_WAIT,
        )
        await self._work(request, self._random.uniform(*self._pace.work_seconds))
        self._ledger.end(gang)
        release = pb.ReleaseNodesRequest(run_id=RUN, gang_id=gang)
        await call_retrying_async(self._scheduler.ReleaseNodes, release)

    async def _work(self, request: pb.RequestNodesRequest, seconds: float) -> None:
        """Keep the nodes for `seconds` from the first grant on, and longer while one is missing."""
        members: dict[str, int] = {}
        until = 0.0
        while not members or (time.monotonic() < until and not self._ending):
            answer, _ = await call_retrying_async(self._scheduler.RequestNodes, request)
            if not answer.granted:
                # Until somebody else has taken over, those that were granted before go on.
                until = max(until, time.monotonic() + _LOOK_SECONDS) if members else 0.0
                continue
            granted = {node.node_id: node.assignment.epoch for node in answer.nodes}
            if granted != members:
                until = until or time.monotonic() + seconds
                self._take(request, granted)
                members = granted
            await asyncio.sleep(_LOOK_SECONDS)

    def _take(self, request: pb.RequestNodesRequest, granted: dict[str, int]) -> None:
        asked = request.num_nodes
        self._ledger.record("grant", gang=request.gang_id, members=granted, asked=asked)
        self._ledger.take(request.gang_id, granted)


def num_partial(nodes: Iterable[pb.Node]) -> int:
    """Gangs that hold some of their nodes and not all; `nodes` is one answer of ListNodes."""
    gangs: dict[tuple[str, str], list[pb.Assignment]] = {}
    for node in nodes:
        if node.assignment.gang_id:
            run_id = node.assignment.run_id or node.run_id
            gangs.setdefault((run_id, node.assignment.gang_id), []).append(node.assignment)
    return sum(not _is_whole(members) for members in gangs.values())


def _is_whole(members: list[pb.Assignment]) -> bool:
    ranks = sorted(member.node_index for member in members)
    return all(member.num_gang_nodes == len(members) for member in members) and (
        ranks == list(range(len(members)))
    )
