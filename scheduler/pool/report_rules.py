"""What heartbeats say of a node: pure functions."""

from __future__ import annotations

from dataclasses import replace

from scheduler.model.records import Node, NodeState
from scheduler.policy.switch_stats import record_switch
from services.chassis.errors import stale_epoch


def check_epochs(node: Node, reported: int, known: int) -> None:
    """Reject a heartbeat of an older node agent, or with an older epoch than reported before.

    Raises:
        ServiceError: STALE_EPOCH.
    """
    current = node.assignment.epoch
    if node.state is NodeState.LOST or not node.registered_epoch <= known <= current:
        raise stale_epoch(f"node {node.node_id}", known, current)
    if not node.reported_epoch <= reported <= known:
        raise stale_epoch(f"report of node {node.node_id}", reported, node.reported_epoch)


def reported_node(
    node: Node, state: NodeState, reported: int, switch_seconds: float | None
) -> Node:
    """The node after its agent reported `state` for the assignment of epoch `reported`.

    `switch_seconds` are those of its last switch; None if there was none.
    """
    current = reported == node.assignment.epoch
    if switch_seconds is not None and current and node.warm:
        node = record_switch(node, switch_seconds)
    return replace(
        node,
        state=state,
        reported_epoch=reported,
        leaving=state is NodeState.DRAINING and current,
        overdue=node.overdue and not current,
        warm=node.warm or state in (NodeState.ACTIVE, NodeState.IDLE),
    )


def is_late(node: Node, now: float, leave_seconds: float) -> bool:
    """Whether a node has not left its old work for a gang within `leave_seconds`."""
    if node.assigned_time is None or not node.assignment.gang_id or not node.available:
        return False
    there = node.reported_epoch == node.assignment.epoch or node.state is NodeState.IDLE
    return not there and now - node.assigned_time >= leave_seconds
