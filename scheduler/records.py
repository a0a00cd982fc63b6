"""What the scheduler knows: nodes, gangs, and the epochs it has given out.

IDLE -> ACTIVATING -> ACTIVE -> DRAINING -> IDLE     moved and reported by the node agent
any  -> LOST                                         moved by the scheduler when the lease runs out
LOST -> IDLE                                         moved by the node agent's next registration
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = [
    "ROLLOUT",
    "TRAIN",
    "AllocationEvent",
    "Assignment",
    "EventKind",
    "Gang",
    "GangKey",
    "Node",
    "NodeState",
    "State",
    "Worker",
]

ROLLOUT = "rollout"
"""Activity tag of every node that no gang holds."""
TRAIN = "train"
"""Capability tag of a node that is lent while it does rollout."""

GangKey = tuple[str, str]
"""run_id and gang_id."""


class NodeState(StrEnum):
    """Where a node stands."""

    IDLE = "idle"
    ACTIVATING = "activating"
    ACTIVE = "active"
    DRAINING = "draining"
    LOST = "lost"


class EventKind(StrEnum):
    """What an entry of the audit log tells."""

    REGISTERED = "registered"
    ASSIGNED = "assigned"
    REPORTED = "reported"
    LOST = "lost"
    DRAINED = "drained"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A process of a node that others may call."""

    tag: str
    """Capability tag it serves."""
    address: str
    """host:port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a node shall do."""

    tag: str = ""
    """Activity tag; empty: nothing."""
    epoch: int = 0
    """Fencing number; 0 only before the first assignment."""
    gang_id: str = ""
    """Gang it belongs to; empty for rollout."""
    lent: bool = False
    """True when a node that can train does rollout meanwhile."""
    rank_offset: int = 0
    """Place of the node among its gang's; every node counts as one rank."""
    world_size: int = 0
    """Nodes of the gang; 0 outside a gang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node: what it can do, shall do and reports."""

    node_id: str
    """Unique name."""
    run_id: str
    """Training job it works for."""
    capability_tags: tuple[str, ...]
    """What it can do, sorted."""
    workers: tuple[Worker, ...] = ()
    """Its processes."""
    train_priority: float = 0.0
    """Higher: better suited to a gang."""
    assignment: Assignment = field(default_factory=Assignment)
    """What it shall do."""
    registered_epoch: int = 0
    """Epoch of its last registration; a heartbeat that knows less comes from an agent before it."""
    state: NodeState = NodeState.IDLE
    """What it reports, or LOST."""
    reported_epoch: int = 0
    """Assignment epoch it has taken up."""
    draining: bool = False
    """An operator wants no work here."""
    leaving: bool = False
    """Its agent winds the present assignment up by itself: it is about to end."""
    released_time: float | None = None
    """When a gang last gave it back, seconds since 1970."""

    @property
    def taken_up(self) -> bool:
        """True when the node does what it shall do."""
        return self.state is NodeState.ACTIVE and self.reported_epoch == self.assignment.epoch

    @property
    def available(self) -> bool:
        """True when the node may be given work."""
        return not (self.state is NodeState.LOST or self.draining or self.leaving)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """A standing request for nodes, all or none."""

    run_id: str
    """Training job."""
    gang_id: str
    """Names the request within its job."""
    tag: str
    """Capability asked for."""
    num_nodes: int
    """Nodes wanted."""
    arrival: int = 0
    """Place in the order of requests."""
    needed_time: float | None = None
    """Takes no node before this, seconds since 1970; None: at once."""

    @property
    def key(self) -> GangKey:
        """Unique name."""
        return self.run_id, self.gang_id


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationEvent:
    """One entry of the audit log."""

    sequence: int
    """Grows by one."""
    time: float
    """Seconds since 1970."""
    node: Node
    """The node after the change."""
    kind: EventKind
    """What happened."""
    cause: str
    """Why, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything that survives the scheduler."""

    nodes: Mapping[str, Node] = field(default_factory=dict)
    """By node_id."""
    gangs: Mapping[GangKey, Gang] = field(default_factory=dict)
    """Requests that stand."""
    last_epoch: int = 0
    """Newest epoch given out or seen; never goes back."""
    last_arrival: int = 0
    """Newest place in the order of requests."""
    last_sequence: int = 0
    """Newest entry of the audit log."""

    def members(self, gang: Gang) -> list[Node]:
        """The nodes assigned to `gang`, in rank order; empty until it is placed."""
        held = [
            node
            for node in self.nodes.values()
            if (node.run_id, node.assignment.gang_id) == gang.key
        ]
        return sorted(held, key=lambda node: node.assignment.rank_offset)

    def granted(self, gang: Gang) -> bool:
        """True when all nodes of `gang` do its work under their present epochs."""
        members = self.members(gang)
        return len(members) == gang.num_nodes and all(node.taken_up for node in members)
