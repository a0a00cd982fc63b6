"""Nodes that were lent to rollout and returned, counted from the scheduler's audit log."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import grpc.aio
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb

from services.launcher.service_clients import Services

_RETRY_SECONDS = 0.5


async def follow_lendings(services: Services, lendings: Lendings) -> None:
    """Count what the scheduler's audit log says; runs until cancelled."""
    while True:
        request = scheduler_pb.WatchAllocationsRequest(
            run_id=services.run_id, after_sequence=lendings.sequence
        )
        try:
            async for response in services.scheduler.WatchAllocations(request):
                for event in response.events:
                    lendings.add(event)
        except grpc.aio.AioRpcError:
            await asyncio.sleep(_RETRY_SECONDS)  # the scheduler restarts; its log survives


@dataclass(slots=True)
class Lendings:
    """How often a node that can train was lent to rollout, and how often it was returned.

    A lending counts once the node reported itself active in it; its return, once the node has
    taken up a later assignment.
    """

    num_lent: int = 0
    num_returned: int = 0
    sequence: int = 0
    """Of the newest event."""
    _lent: set[str] = field(default_factory=set)

    def add(self, event: scheduler_pb.AllocationEvent) -> None:
        """Count an event of the scheduler's audit log; they come in their order."""
        if not event.HasField("node"):
            return
        self.sequence, node = event.sequence, event.node
        if node.reported_epoch != node.assignment.epoch:
            return
        if node.assignment.lent and node.state == scheduler_pb.NODE_STATE_ACTIVE:
            self.num_lent += node.node_id not in self._lent
            self._lent.add(node.node_id)
        elif not node.assignment.lent and node.node_id in self._lent:
            self.num_returned += 1
            self._lent.discard(node.node_id)
