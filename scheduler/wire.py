"""Between the contract's messages and the scheduler's records; refuses what makes no sense."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from scheduler.records import (
    ROLLOUT,
    AllocationEvent,
    Assignment,
    Gang,
    Node,
    NodeState,
    Worker,
)
from services.chassis.errors import invalid_argument

__all__ = [
    "assignment_message",
    "duration_message",
    "event_message",
    "gang_record",
    "node_message",
    "node_record",
    "state_record",
    "wait_seconds",
]

_STATES = {
    NodeState.IDLE: pb.NODE_STATE_IDLE,
    NodeState.ACTIVATING: pb.NODE_STATE_ACTIVATING,
    NodeState.ACTIVE: pb.NODE_STATE_ACTIVE,
    NodeState.DRAINING: pb.NODE_STATE_DRAINING,
    NodeState.LOST: pb.NODE_STATE_LOST,
}
_REPORTABLE: dict[int, NodeState] = {
    number: state for state, number in _STATES.items() if state is not NodeState.LOST
}


def node_record(request: pb.RegisterNodeRequest) -> Node:
    """The node that registers.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    _require("node_id", request.node_id)
    _require("run_id", request.run_id)
    tags = tuple(sorted(set(request.capability_tags)))
    if not tags or "" in tags:
        raise invalid_argument("capability_tags", list(tags), "name at least one, none empty")
    for worker in request.workers:
        if worker.tag not in tags:
            raise invalid_argument("workers.tag", worker.tag, "use one of capability_tags")
    return Node(
        node_id=request.node_id,
        run_id=request.run_id,
        capability_tags=tags,
        workers=tuple(Worker(tag=entry.tag, address=entry.address) for entry in request.workers),
        train_priority=request.train_priority,
    )


def state_record(state: int) -> NodeState:
    """The state that a node reports.

    Raises:
        ServiceError: INVALID_ARGUMENT, not one that a node agent may report.
    """
    if state not in _REPORTABLE:
        raise invalid_argument("state", state, "report IDLE, ACTIVATING, ACTIVE or DRAINING")
    return _REPORTABLE[state]


def gang_record(request: pb.RequestNodesRequest) -> Gang:
    """The gang that asks.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    for field in ("run_id", "gang_id", "tag"):
        _require(field, getattr(request, field))
    if request.tag == ROLLOUT:
        cure = "nodes that no gang holds roll out by themselves"
        raise invalid_argument("tag", request.tag, cure)
    if request.num_nodes < 1:
        raise invalid_argument("num_nodes", request.num_nodes, "ask for at least 1")
    needed = request.HasField("needed_time")
    return Gang(
        run_id=request.run_id,
        gang_id=request.gang_id,
        tag=request.tag,
        num_nodes=request.num_nodes,
        needed_time=_seconds(request.needed_time) if needed else None,
    )


def wait_seconds(wait: Duration, limit: float) -> float:
    """How long a long-poll may wait.

    Raises:
        ServiceError: INVALID_ARGUMENT, negative or above `limit`.
    """
    seconds = _seconds(wait)
    if not 0 <= seconds <= limit:
        raise invalid_argument("wait", seconds, f"wait between 0 and {limit:g} seconds")
    return seconds


def assignment_message(assignment: Assignment) -> pb.Assignment:
    """What a node shall do."""
    return pb.Assignment(
        tag=assignment.tag,
        epoch=assignment.epoch,
        gang_id=assignment.gang_id,
        lent=assignment.lent,
        rank_offset=assignment.rank_offset,
        world_size=assignment.world_size,
    )


def node_message(node: Node, heartbeat_time: float | None = None) -> pb.Node:
    """The node, last heard of at `heartbeat_time`."""
    return pb.Node(
        node_id=node.node_id,
        capability_tags=node.capability_tags,
        workers=[pb.Worker(tag=entry.tag, address=entry.address) for entry in node.workers],
        assignment=assignment_message(node.assignment),
        state=_STATES[node.state],
        reported_epoch=node.reported_epoch,
        train_priority=node.train_priority,
        heartbeat_time=None if heartbeat_time is None else _timestamp(heartbeat_time),
        run_id=node.run_id,
        draining=node.draining,
    )


def event_message(event: AllocationEvent) -> pb.AllocationEvent:
    """The entry of the audit log."""
    return pb.AllocationEvent(
        sequence=event.sequence,
        event_time=_timestamp(event.time),
        node=node_message(event.node),
        kind=event.kind.value,
        cause=event.cause,
    )


def duration_message(seconds: float) -> Duration:
    """A span of time."""
    span = Duration()
    span.FromNanoseconds(round(seconds * 1e9))
    return span


def _require(field: str, value: str) -> None:
    if not value:
        raise invalid_argument(field, value, "it must not be empty")


def _seconds(span: Duration | Timestamp) -> float:
    return span.seconds + span.nanos / 1e9


def _timestamp(seconds: float) -> Timestamp:
    moment = Timestamp()
    moment.FromNanoseconds(round(seconds * 1e9))
    return moment
