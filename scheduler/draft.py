"""Every change of state the scheduler can make, as pure steps on a draft that is then committed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from scheduler.policy import AllocationPolicy, Plan
from scheduler.records import (
    AllocationEvent,
    Assignment,
    EventKind,
    Gang,
    GangKey,
    Node,
    NodeState,
    State,
)
from services.chassis.errors import already_exists, invalid_argument, not_found, stale_epoch

__all__ = ["Draft"]


class Draft:
    """A copy of the state to change; nothing is true before the store has committed it.

    Args:
        state: what holds now.
        policy: decides who does what after each change.
        now: seconds since 1970.
    """

    def __init__(self, state: State, policy: AllocationPolicy, now: float) -> None:
        self._nodes = dict(state.nodes)
        self._gangs = dict(state.gangs)
        self._epoch = state.last_epoch
        self._arrival = state.last_arrival
        self._sequence = state.last_sequence
        self._policy = policy
        self._now = now
        self.events: list[AllocationEvent] = []
        """Entries of the audit log for the changes made."""

    @property
    def state(self) -> State:
        """What would hold."""
        return State(
            nodes=dict(self._nodes),
            gangs=dict(self._gangs),
            last_epoch=self._epoch,
            last_arrival=self._arrival,
            last_sequence=self._sequence,
        )

    def register(self, node: Node) -> None:
        """Let a node join or come back; it always gets a new epoch, and so does its gang.

        Only what the node says of itself is taken from `node`; an operator's drain stays.
        """
        known = self._nodes.get(node.node_id, node)
        node = replace(
            node,
            assignment=known.assignment,
            draining=known.draining,
            released_time=known.released_time,
        )
        cause = "came back" if node.node_id in self._nodes else "joined"
        self._put(node, EventKind.REGISTERED, cause)
        self.replan(f"{node.node_id} {cause}", renewed=node.node_id)

    def report(self, node_id: str, state: NodeState, reported: int, known: int) -> None:
        """Take a heartbeat: the node stands at `state` for `reported`, and knows epoch `known`.

        Raises:
            ServiceError: NOT_FOUND, or ABORTED / STALE_EPOCH: the node agent must register again.
        """
        node = self._node(node_id)
        current = node.assignment.epoch
        if node.state is NodeState.LOST or not node.registered_epoch <= known <= current:
            raise stale_epoch(f"node {node_id}", known, current)
        if not node.reported_epoch <= reported <= known:
            raise stale_epoch(f"report of node {node_id}", reported, node.reported_epoch)
        if (state, reported) == (node.state, node.reported_epoch):
            return
        leaving = state is NodeState.DRAINING and reported == current
        node = replace(node, state=state, reported_epoch=reported, leaving=leaving)
        self._put(node, EventKind.REPORTED, "leaving" if leaving else "heartbeat")
        if leaving:
            self.replan(f"{node_id} is leaving")

    def see_epoch(self, epoch: int) -> None:
        """Never give out an epoch that somebody has already seen, even if the store forgot it."""
        self._epoch = max(self._epoch, epoch)

    def request(self, gang: Gang) -> None:
        """Let `gang` ask for nodes; asking again changes nothing but `needed_time`.

        Raises:
            ServiceError: ALREADY_EXISTS, the same gang asked for something else.
        """
        standing = self._gangs.get(gang.key)
        if standing is None:
            self._arrival += 1
            standing = replace(gang, arrival=self._arrival)
        elif (standing.tag, standing.num_nodes) != (gang.tag, gang.num_nodes):
            raise already_exists("gang", gang.gang_id)
        self._gangs[gang.key] = replace(standing, needed_time=gang.needed_time)
        self.replan(f"gang {gang.gang_id} requested")

    def release(self, key: GangKey) -> None:
        """Let a gang give its nodes back; a gang that does not exist has none."""
        if self._gangs.pop(key, None) is not None:
            self.replan(f"gang {key[1]} released")

    def drain(self, node_id: str, wanted: bool) -> None:
        """Give a node no more work, or work again.

        Raises:
            ServiceError: NOT_FOUND.
        """
        node = self._node(node_id)
        if node.draining == wanted:
            return
        cause = "drain requested" if wanted else "drain undone"
        self._put(replace(node, draining=wanted), EventKind.DRAINED, cause)
        self.replan(f"{node_id}: {cause}")

    def lose(self, node_ids: Iterable[str]) -> None:
        """Plan without the nodes whose lease ran out."""
        lost = sorted(node_ids)
        for node_id in lost:
            node = replace(self._nodes[node_id], state=NodeState.LOST)
            self._put(node, EventKind.LOST, "no heartbeat within the lease")
        if lost:
            self.replan(f"lost {', '.join(lost)}")

    def replan(self, cause: str, renewed: str | None = None) -> Plan:
        """Carry the policy's plan out: each changed assignment gets its own new epoch.

        A gang whose members changed, or one of whose members registered again (`renewed`), starts
        afresh: all of it gets new epochs.
        """
        plan = self._policy.plan(list(self._nodes.values()), list(self._gangs.values()), self._now)
        afresh = self._reformed(plan, renewed)
        for node in sorted(self._nodes.values(), key=lambda node: node.node_id):
            wanted = plan.assignments.get(node.node_id, Assignment())
            is_new = replace(node.assignment, epoch=0) != wanted or node.node_id == renewed
            if is_new or (wanted.gang_id and (node.run_id, wanted.gang_id) in afresh):
                self._assign(node, wanted, cause, is_registration=node.node_id == renewed)
        return plan

    def _reformed(self, plan: Plan, renewed: str | None) -> set[GangKey]:
        reformed = set()
        for key in self._gangs:
            before = {
                node_id
                for node_id, node in self._nodes.items()
                if (node.run_id, node.assignment.gang_id) == key
            }
            after = {
                node_id
                for node_id, wanted in plan.assignments.items()
                if (self._nodes[node_id].run_id, wanted.gang_id) == key
            }
            if before != after or renewed in after:
                reformed.add(key)
        return reformed

    def _assign(self, node: Node, wanted: Assignment, cause: str, *, is_registration: bool) -> None:
        self._epoch += 1
        left_gang = bool(node.assignment.gang_id) and not wanted.gang_id
        node = replace(
            node,
            assignment=replace(wanted, epoch=self._epoch),
            registered_epoch=self._epoch if is_registration else node.registered_epoch,
            released_time=self._now if left_gang else node.released_time,
        )
        self._put(node, EventKind.ASSIGNED, cause)

    def _put(self, node: Node, kind: EventKind, cause: str) -> None:
        self._nodes[node.node_id] = node
        self._sequence += 1
        event = AllocationEvent(
            sequence=self._sequence, time=self._now, node=node, kind=kind, cause=cause
        )
        self.events.append(event)

    def _node(self, node_id: str) -> Node:
        if not node_id:
            raise invalid_argument("node_id", node_id, "name the node")
        if node_id not in self._nodes:
            raise not_found("node", node_id)
        return self._nodes[node_id]
