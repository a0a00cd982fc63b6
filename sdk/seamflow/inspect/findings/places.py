"""The link to a place is cut, or a single node is lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from seamflow.errors import DeadlineError, UnavailableError
from seamflow.inspect.diagnosis import Finding, heartbeat, published
from seamflow.inspect.endpoints import SERVICES
from seamflow.inspect.snapshot import Snapshot
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb

_FEWEST_PARTS = 2
"""A single silent process says nothing of a link."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What answers at an address, or does not."""

    name: str
    place: str
    """Zone of its host; where none is named, the host."""
    answers: bool
    last_heard: float | None = None
    """Unix time."""


def cut_links(snapshot: Snapshot) -> Iterator[Finding]:
    """Places of which nothing answers, while something of another place does.

    A machine of its own that is down looks the same from here.
    """
    for place, parts in _cut(snapshot).items():
        times = [part.last_heard for part in parts if part.last_heard is not None]
        yield Finding(
            rule="link_cut",
            sentence=f"The link to {place} is cut, or what stands there is down: nothing of it "
            f"answers ({', '.join(part.name for part in parts)}), and other places do.",
            cure="Mend the network between here and there, or start the machines there again. "
            "Agents go on until admission closes at the staleness bound, the trainer as far as "
            "its samples last; both continue by themselves, and nothing is lost or doubled.",
            since=min(times, default=published(snapshot)),
        )


def services_beyond(snapshot: Snapshot) -> frozenset[str]:
    """Services that a cut link explains, by name in `Snapshot.problems`."""
    cut = _cut(snapshot)
    return frozenset(
        name for name, address in snapshot.addresses.items() if _place(snapshot, address) in cut
    )


def lost_nodes(snapshot: Snapshot) -> Iterator[Finding]:
    """Nodes that no cut link explains."""
    cut = _cut(snapshot)
    for node in snapshot.nodes or ():
        if node.state != scheduler_pb.NODE_STATE_LOST or _place_of(snapshot, node) in cut:
            continue
        yield Finding(
            rule="node_lost",
            sentence=f"Node {node.node_id} is lost; its {node.assignment.tag or 'no'} work waits "
            "for other nodes.",
            cure=f"{_cure(snapshot, node.node_id)}, or remove it permanently with `seamflow drain "
            f"{node.node_id}`.",
            since=heartbeat(node),
        )


def _cure(snapshot: Snapshot, node_id: str) -> str:
    restart = "Restart its node agent (`python -m services.node_agent`)"
    if any(each.node_id == node_id and each.info is not None for each in snapshot.servers):
        return f"Its rollout server answers: mend the link between it and the scheduler. {restart}"
    return restart


def _cut(snapshot: Snapshot) -> dict[str, list[_Part]]:
    """By place the parts of those that are silent altogether; none if no other place answers."""
    found: dict[str, list[_Part]] = defaultdict(list)
    for part in _parts(snapshot):
        found[part.place].append(part)
    silent = {
        place: parts
        for place, parts in found.items()
        if len(parts) >= _FEWEST_PARTS and not any(part.answers for part in parts)
    }
    return silent if any(part.answers for parts in found.values() for part in parts) else {}


def _parts(snapshot: Snapshot) -> Iterator[_Part]:
    for name, address in snapshot.addresses.items():
        is_silent = isinstance(snapshot.problems.get(name), UnavailableError | DeadlineError)
        yield _Part(SERVICES[name].name, _place(snapshot, address), not is_silent)
    for server in snapshot.servers:
        place = _place(snapshot, server.address)
        yield _Part(f"rollout server of {server.node_id}", place, server.info is not None)
    for node in snapshot.nodes or ():
        if node.state == scheduler_pb.NODE_STATE_LOST and (place := _place_of(snapshot, node)):
            yield _Part(f"node {node.node_id}", place, answers=False, last_heard=heartbeat(node))


def _place_of(snapshot: Snapshot, node: scheduler_pb.Node) -> str:
    """Where the workers of a node are; empty: it has none."""
    return next((_place(snapshot, worker.address) for worker in node.workers), "")


def _place(snapshot: Snapshot, address: str) -> str:
    """Of several addresses that of the first."""
    host = address.rpartition("/")[2].partition(",")[0].removeprefix("ipv4:").rpartition(":")[0]
    zone = snapshot.zones.get(host)
    return f"zone {zone!r} ({host})" if zone else host
