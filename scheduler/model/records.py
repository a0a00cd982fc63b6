"""What the scheduler knows: nodes, gangs, runs, and the epochs it has given out.

IDLE -> ACTIVATING -> ACTIVE -> DRAINING -> IDLE     moved and reported by the node agent
any  -> LOST                                         moved by the scheduler when the lease runs out
LOST -> IDLE                                         moved by the node agent's next registration
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from scheduler.model.lending import Lending
from scheduler.model.split_advice import Balance

__all__ = [
    "ROLLOUT",
    "TRAIN",
    "AllocationEvent",
    "Assignment",
    "EventKind",
    "Gang",
    "GangKey",
    "Hardware",
    "Node",
    "NodeReport",
    "NodeState",
    "RunPolicy",
    "State",
    "Worker",
]

ROLLOUT = "rollout"
"""Activity tag of every node that no gang holds. Gangs ask for any other tag."""
TRAIN = "train"
"""The tag that trainers ask for."""

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
    OVERDUE = "overdue"
    WAITING = "waiting"
    KEPT = "kept"
    POLICY = "policy"
    ADVICE = "advice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A process of a node that others may call."""

    tag: str
    """Capability tag it serves."""
    address: str
    """host:port."""
    run_id: str = ""
    """Training job it works for; empty: the node's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What a node is made of, all its devices together; 0: not known."""

    memory_bytes_per_second: float = 0.0
    """Of the device memory."""
    flops: float = 0.0
    """Dense floating-point operations per second in the training dtype."""
    device_bytes: int = 0
    """Device memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What a node's agent measured last."""

    used_device_bytes: int = 0
    """Device memory in use."""
    num_turns: int = 0
    """Turns its rollout server runs or holds in its queue."""
    tokens_per_second: float = 0.0
    """Tokens it samples."""
    used_host_bytes: int = 0
    """Host memory of its worker processes."""


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
    """True when a node that a gang could ask for does rollout meanwhile."""
    rank_offset: int = 0
    """Place of the node among its gang's; every node counts as one rank."""
    world_size: int = 0
    """Nodes of the gang; 0 outside a gang."""
    run_id: str = ""
    """Training job to do it for; empty: the node's own."""

    @property
    def work(self) -> tuple[str, str, str, int, int, bool]:
        """All of it but the epoch: two assignments of the same work need no switch."""
        return (
            self.tag,
            self.run_id,
            self.gang_id,
            self.rank_offset,
            self.world_size,
            self.lent,
        )


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
    assigned_time: float | None = None
    """When it got its assignment, seconds since 1970."""
    overdue: bool = False
    """It did not leave its old activity for a gang in time, and has not left it since."""
    warm: bool = False
    """It has finished a switch since it registered: that first one was a start."""
    hardware: Hardware = field(default_factory=Hardware)
    """What it is made of."""
    switch_seconds: Mapping[str, float] = field(default_factory=dict)
    """Mean seconds of its switches by the activity tag they led to."""
    report: NodeReport | None = field(default=None, compare=False)
    """Its last measurements. Not stored, so a new one alone is no change of the state."""

    @property
    def assigned_run(self) -> str:
        """The run it does its assignment for."""
        return self.assignment.run_id or self.run_id

    @property
    def gang_key(self) -> GangKey | None:
        """The gang that holds it."""
        return self.gang_under(self.assignment)

    def gang_under(self, assignment: Assignment) -> GangKey | None:
        """The gang that would hold it, had it this assignment."""
        run_id = assignment.run_id or self.run_id
        return (run_id, assignment.gang_id) if assignment.gang_id else None

    @property
    def num_turns(self) -> int:
        """Turns it runs, as far as it is known."""
        return 0 if self.report is None else self.report.num_turns

    def runs_for(self, tag: str) -> tuple[str, ...]:
        """The runs it can do `tag` for, sorted: those that have a worker for it here.

        A node that names no worker for a tag it can do does it for its own run.
        """
        if tag not in self.capability_tags:
            return ()
        if not self.workers:
            return (self.run_id,)
        runs = {worker.run_id or self.run_id for worker in self.workers if worker.tag == tag}
        return tuple(sorted(runs)) if runs else (self.run_id,)

    @property
    def runs(self) -> frozenset[str]:
        """Its own run, and those it has a worker for."""
        return frozenset((self.run_id, *(worker.run_id or self.run_id for worker in self.workers)))

    def seen_by(self, run_id: str) -> Node:
        """As the processes of one run shall see it: without the workers of others."""
        mine = tuple(worker for worker in self.workers if (worker.run_id or self.run_id) == run_id)
        return replace(self, workers=mine)

    @property
    def taken_up(self) -> bool:
        """True when the node does what it shall do."""
        return self.state is NodeState.ACTIVE and self.reported_epoch == self.assignment.epoch

    @property
    def available(self) -> bool:
        """True when the node may be given work."""
        unfit = self.draining or self.leaving or self.overdue
        return not (unfit or self.state is NodeState.LOST)


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
    batch: int = 0
    """Number of the batch it wants its nodes for; 0: not told."""
    needed_time: float | None = None
    """Takes no node before this, seconds since 1970; None: at once."""
    waits_for: str = ""
    """Why it has no nodes, for people; empty: it has them."""
    parked: bool = False
    """It gave its nodes back and has them until anybody wants them: lending them does not pay."""

    @property
    def key(self) -> GangKey:
        """Unique name."""
        return self.run_id, self.gang_id


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPolicy:
    """A run's place among those that share the pool."""

    priority: int = 0
    """Its gangs are placed before those of a lower priority, and preempt them."""
    max_nodes: int = 0
    """Most nodes it may have at once, gangs and rollout together; 0: no limit."""
    rollout_share: float = 1.0
    """Its part of the nodes that no gang holds, relative to the other runs'; above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationEvent:
    """One entry of the audit log."""

    sequence: int
    """Grows by one."""
    time: float
    """Seconds since 1970."""
    kind: EventKind
    """What happened."""
    cause: str
    """Why, for people."""
    node: Node | None = None
    """The node after the change; None: it concerns a gang or a run."""
    run_id: str = ""
    """The run that a change without a node concerns."""

    def concerns(self, run_id: str) -> bool:
        """True when the run, or any run if it is empty, has to do with the change."""
        runs = {self.run_id} if self.node is None else self.node.runs
        return not run_id or run_id in runs


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything that survives the scheduler."""

    nodes: Mapping[str, Node] = field(default_factory=dict)
    """By node_id."""
    gangs: Mapping[GangKey, Gang] = field(default_factory=dict)
    """Requests that stand."""
    runs: Mapping[str, RunPolicy] = field(default_factory=dict)
    """Policies that were set, by run_id."""
    lendings: Mapping[GangKey, Lending] = field(default_factory=dict)
    """What was measured of gangs that give their nodes back."""
    balances: Mapping[GangKey, Balance] = field(default_factory=dict)
    """What the batches of gangs took, and whether more nodes should generate for them."""
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
            if node.assignment.gang_id == gang.gang_id and node.assigned_run == gang.run_id
        ]
        return sorted(held, key=lambda node: node.assignment.rank_offset)

    def waiting(self) -> list[Gang]:
        """The gangs that have no nodes, in the order in which they will be placed."""
        default = RunPolicy()

        def order(gang: Gang) -> tuple[int, int]:
            return -self.runs.get(gang.run_id, default).priority, gang.arrival

        return sorted((gang for gang in self.gangs.values() if gang.waits_for), key=order)

    def granted(self, gang: Gang) -> bool:
        """True when all nodes of `gang` do its work under their present epochs."""
        members = self.members(gang)
        return len(members) == gang.num_nodes and all(node.taken_up for node in members)
