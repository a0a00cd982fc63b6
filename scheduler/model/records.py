"""The scheduler's records: nodes, gangs, runs, and assignments with their epochs.

IDLE -> ACTIVATING -> ACTIVE -> DRAINING -> IDLE     moved and reported by the node agent
any  -> LOST                                         moved by the scheduler when the lease runs out
LOST -> IDLE                                         moved by the node agent's next registration
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar

from seamflow.scheduler.v1.scheduler_service_pb2 import NodeReport

from scheduler.model.lending_state import LendingState
from scheduler.model.stage_balance import StageBalance

ROLLOUT = "rollout"
"""Activity tag of nodes outside of gangs. Gangs request any other tag."""
TRAIN = "train"
"""The tag that trainers request."""

GangKey = tuple[str, str]
"""run_id and gang_id."""


class NodeState(StrEnum):
    IDLE = "idle"
    ACTIVATING = "activating"
    ACTIVE = "active"
    DRAINING = "draining"
    LOST = "lost"

    @classmethod
    def _missing_(cls, value: object) -> NodeState:
        """One that only a newer scheduler knows: the node must register again."""
        return cls.LOST


class EventKind(StrEnum):
    """The kind of an entry of the audit log."""

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
    TAIL = "tail"
    SPLIT = "split"
    RESIZED = "resized"
    OTHER = "other"
    """Written by a newer scheduler."""

    @classmethod
    def _missing_(cls, value: object) -> EventKind:
        return cls.OTHER


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A process of a node that serves rpcs."""

    tag: str
    address: str
    run_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The hardware of a node, all its devices together; 0: unknown."""

    memory_bytes_per_second: float = 0.0
    flops: float = 0.0
    """Dense floating-point operations per second in the training dtype."""
    device_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a node must do."""

    tag: str = ""
    epoch: int = 0
    """Fencing number; 0 only before the first assignment."""
    gang_id: str = ""
    lent: bool = False
    rank_offset: int = 0
    """Index of the node in its gang."""
    world_size: int = 0
    """Nodes of the gang; 0 outside a gang."""
    run_id: str = ""

    @property
    def work(self) -> tuple[str, str, str, int, int, bool]:
        """Everything except the epoch: two assignments of the same work need no switch."""
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
    """A node: its capabilities, assignment and report."""

    __pydantic_config__: ClassVar = {"arbitrary_types_allowed": True}
    """The store's reader of records meets the report, which is a message and never stored."""

    node_id: str
    run_id: str
    capability_tags: tuple[str, ...]
    """Its capabilities, sorted."""
    workers: tuple[Worker, ...] = ()
    train_priority: float = 0.0
    """Higher: better suited to a gang."""
    assignment: Assignment = field(default_factory=Assignment)
    registered_epoch: int = 0
    """Epoch of its last registration; a heartbeat that knows an older one is of an older agent."""
    state: NodeState = NodeState.IDLE
    """Its reported state, or LOST."""
    reported_epoch: int = 0
    """Epoch of the assignment that its state refers to."""
    draining: bool = False
    """An operator drains it: it gets no work."""
    leaving: bool = False
    """Its agent drains the present assignment, and is about to exit."""
    released_time: float | None = None
    """When a gang last released it, seconds since 1970."""
    assigned_time: float | None = None
    """When it got its assignment, seconds since 1970."""
    overdue: bool = False
    """It did not leave its old activity for a gang in time, and still has not."""
    warm: bool = False
    """It finished a switch since it registered; the first one includes its start."""
    hardware: Hardware = field(default_factory=Hardware)
    switch_seconds: Mapping[str, float] = field(default_factory=dict)
    """Mean seconds of its switches, by new activity tag."""
    report: NodeReport | None = field(default=None, compare=False)
    """Its latest measurements; not stored, and not compared."""

    @property
    def assigned_run(self) -> str:
        return self.assignment.run_id or self.run_id

    @property
    def gang_key(self) -> GangKey | None:
        return self.gang_under(self.assignment)

    def gang_under(self, assignment: Assignment) -> GangKey | None:
        """The gang that would hold it under `assignment`."""
        run_id = assignment.run_id or self.run_id
        return (run_id, assignment.gang_id) if assignment.gang_id else None

    @property
    def num_turns(self) -> int:
        """Turns it runs or queues; 0 if unknown."""
        return 0 if self.report is None else self.report.num_turns

    def runs_for(self, tag: str) -> tuple[str, ...]:
        """The runs for which it has a worker of `tag`, sorted.

        A node without a worker for one of its tags serves that tag to its own run.
        """
        if tag not in self.capability_tags:
            return ()
        if not self.workers:
            return (self.run_id,)
        runs = {worker.run_id or self.run_id for worker in self.workers if worker.tag == tag}
        return tuple(sorted(runs)) if runs else (self.run_id,)

    @property
    def runs(self) -> frozenset[str]:
        """Its own run, and the runs of its workers."""
        return frozenset((self.run_id, *(worker.run_id or self.run_id for worker in self.workers)))

    def seen_by(self, run_id: str) -> Node:
        """The node with the workers of one run only."""
        mine = tuple(worker for worker in self.workers if (worker.run_id or self.run_id) == run_id)
        return replace(self, workers=mine)

    @property
    def taken_up(self) -> bool:
        """True when the node is active under its present assignment."""
        return self.state is NodeState.ACTIVE and self.reported_epoch == self.assignment.epoch

    @property
    def available(self) -> bool:
        """True when the node may be assigned work."""
        unfit = self.draining or self.leaving or self.overdue
        return not (unfit or self.state is NodeState.LOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """A request for nodes, all or none."""

    run_id: str
    gang_id: str
    tag: str
    num_nodes: int
    node_ids: tuple[str, ...] = ()
    """The nodes that its ranks run on, and so the only ones that it can use; empty: any."""
    arrival: int = 0
    """Position in the order of requests."""
    batch: int = 0
    needed_time: float | None = None
    """Gets no node before this, seconds since 1970; None: immediately."""
    waits_for: str = ""
    """Why it has no nodes, for people; empty: it has them."""
    tail_nodes: int = 0
    """m: nodes that are enough for its run to generate while it holds its own; 0: all that are
    left, as its run goes on with the next batch or nothing is known."""
    unit_nodes: int = 0
    max_nodes: int = 0
    done_tokens: int = 0
    parked: bool = False
    """It released its nodes but keeps them until another gang requests them (not lent)."""

    @property
    def key(self) -> GangKey:
        return self.run_id, self.gang_id

    def can_use(self, node_id: str) -> bool:
        """Whether its ranks run there, or anywhere."""
        return not self.node_ids or node_id in self.node_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """When a gang begins with its next batch, and the predicted effect."""

    remaining: int
    """R_t: rollouts of incomplete groups at which it begins; 0: when the batch is complete."""
    num_kept: int
    """m: instances that are enough for them."""
    seconds: float
    """Predicted seconds from the start of generation to the end of the gang's work."""
    gang_seconds: float
    """Predicted seconds of these from the start of the gang on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPolicy:
    """Priority, quota and fair share of a run."""

    priority: int = 0
    max_nodes: int = 0
    rollout_share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationEvent:
    """One entry of the audit log."""

    sequence: int
    time: float
    kind: EventKind
    cause: str
    node: Node | None = None
    """The node after the change; None: it concerns a gang or a run."""
    run_id: str = ""
    """The run, if the change has no node."""

    def concerns(self, run_id: str) -> bool:
        """Whether the event concerns the run; empty: any run."""
        runs = {self.run_id} if self.node is None else self.node.runs
        return not run_id or run_id in runs


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of the scheduler, as stored."""

    nodes: Mapping[str, Node] = field(default_factory=dict)
    gangs: Mapping[GangKey, Gang] = field(default_factory=dict)
    runs: Mapping[str, RunPolicy] = field(default_factory=dict)
    lendings: Mapping[GangKey, LendingState] = field(default_factory=dict)
    balances: Mapping[GangKey, StageBalance] = field(default_factory=dict)
    tails: Mapping[GangKey, Tail] = field(default_factory=dict)
    last_epoch: int = 0
    """Newest epoch assigned or seen; never decreases."""
    last_arrival: int = 0
    """Newest position in the order of requests."""
    last_sequence: int = 0
    """Newest entry of the audit log."""

    def members(self, gang: Gang) -> list[Node]:
        """The nodes assigned to `gang`, in rank order; empty while it waits."""
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
        """True when all nodes of `gang` are active under their present epochs."""
        members = self.members(gang)
        return len(members) == gang.num_nodes and all(node.taken_up for node in members)
