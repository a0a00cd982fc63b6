"""The scheduler's own account of what it did, as the checker reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

if TYPE_CHECKING:
    from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceAsyncStub

_QUIET_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of the audit log."""

    sequence: int
    """Grows by one."""
    kind: str
    """ "registered", "assigned", "reported", "lost" or "drained"."""
    node: str
    """Node after the change."""
    epoch: int
    """Its assignment."""
    tag: str = ""
    """Its activity tag."""
    gang: str = ""
    """For whom; empty outside a gang."""
    cause: str = ""
    """Why, for people."""


def entries(events: Iterable[pb.AllocationEvent]) -> list[Entry]:
    """The assignments in the events."""
    return [
        Entry(
            sequence=event.sequence,
            kind=event.kind,
            node=event.node.node_id,
            epoch=event.node.assignment.epoch,
            tag=event.node.assignment.tag,
            gang=event.node.assignment.gang_id,
            cause=event.cause,
        )
        for event in events
    ]


async def read_audit(scheduler: SchedulerServiceAsyncStub) -> list[Entry]:
    """The whole audit log, up to now."""
    found: list[pb.AllocationEvent] = []
    stream = scheduler.WatchAllocations(pb.WatchAllocationsRequest())
    with suppress(TimeoutError):
        while True:
            async with asyncio.timeout(_QUIET_SECONDS):
                message = await stream.read()
            assert isinstance(message, pb.WatchAllocationsResponse), "the scheduler ended"
            found += message.events
    stream.cancel()
    # A scheduler may begin its account anew; what differs under one number stays.
    return list(dict.fromkeys(entries(found)))


def gangs_by_assignment(audit: Sequence[Entry]) -> Mapping[tuple[str, int], str]:
    """(node, epoch) -> the gang whose work that is; only assignments to gangs."""
    return {(e.node, e.epoch): e.gang for e in audit if e.kind == "assigned" and e.gang}
