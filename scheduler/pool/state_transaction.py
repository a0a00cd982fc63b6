"""A transaction on the scheduler's state: every possible change, as a pure step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from seamflow.scheduler.v1.scheduler_service_pb2 import NodeReport

from scheduler.model.lending_state import (
    BatchForecast,
    LendingDecision,
)
from scheduler.model.records import (
    AllocationEvent,
    Assignment,
    EventKind,
    Gang,
    GangKey,
    Node,
    NodeState,
    RunPolicy,
    State,
    Tail,
)
from scheduler.model.stage_balance import StageBalance
from scheduler.policy.allocation_policy import AllocationPolicy, Plan
from scheduler.policy.lending import record_switch
from scheduler.pool.gang_measurements import Allocation, GangMeasurements
from services.chassis.errors import already_exists, invalid_argument, not_found, stale_epoch

_RELEASED = LendingDecision(lend=True, measured=False)


class StateTransaction:
    """Changes to a copy of the state; they take effect when the store commits them.

    Args:
        state: the committed state.
        policy: decides assignments after each change.
        now: seconds since 1970.
        allocation: None: gangs keep their number of nodes.
    """

    def __init__(
        self,
        state: State,
        policy: AllocationPolicy,
        now: float,
        allocation: Allocation | None = None,
    ) -> None:
        self._nodes = state.nodes
        self._own_nodes: dict[str, Node] | None = None
        self._gangs = dict(state.gangs)
        self._runs = dict(state.runs)
        self._tails = dict(state.tails)
        self._epoch = state.last_epoch
        self._arrival = state.last_arrival
        self._sequence = state.last_sequence
        self._policy, self._now = policy, now
        self.events: list[AllocationEvent] = []
        """Entries of the audit log for these changes."""
        self._measured = GangMeasurements(
            state,
            policy,
            now,
            allocation,
            nodes=self._all_nodes,
            log=self._log,
        )

    @property
    def state(self) -> State:
        self._own_nodes = None  # shared now: the next change copies
        return State(
            nodes=self._nodes,
            gangs=dict(self._gangs),
            runs=dict(self._runs),
            lendings=dict(self._measured.lendings),
            balances=dict(self._measured.balances),
            tails=dict(self._tails),
            last_epoch=self._epoch,
            last_arrival=self._arrival,
            last_sequence=self._sequence,
        )

    def register(self, *nodes: Node) -> None:
        """Register nodes, for the first time or again; each gets a new epoch, as does its gang.

        An operator's drain and measured switch times stay.
        """
        causes = []
        for node in nodes:
            known = self._nodes.get(node.node_id, node)
            cause = "registered again" if node.node_id in self._nodes else "registered"
            causes.append(f"{node.node_id} {cause}")
            joined = replace(
                node,
                assignment=known.assignment,
                draining=known.draining,
                released_time=known.released_time,
                switch_seconds=known.switch_seconds,
            )
            self._put(joined, EventKind.REGISTERED, cause)
        self.replan(", ".join(causes), renewed=[node.node_id for node in nodes])

    def report(
        self,
        node_id: str,
        state: NodeState,
        reported: int,
        known: int,
        *,
        switch_seconds: float | None = None,
        report: NodeReport | None = None,
    ) -> None:
        """Apply a heartbeat.

        Args:
            node_id: the node.
            state: its state.
            reported: epoch of the assignment that `state` refers to.
            known: newest epoch the node has received.
            switch_seconds: duration of its last switch, if there was one.
            report: measurements of its agent.

        Raises:
            ServiceError: NOT_FOUND, or ABORTED / STALE_EPOCH: the node agent must register again.
        """
        node = self._node(node_id)
        check_epochs(node, reported, known)
        if report is not None:
            node = self._keep(replace(node, report=report))
        if (state, reported) == (node.state, node.reported_epoch):
            return
        after = reported_node(node, state, reported, switch_seconds)
        self._put(after, EventKind.REPORTED, "leaving" if after.leaving else "heartbeat")
        if after.leaving:
            self.replan(f"{node_id} is leaving")
        elif node.overdue and not after.overdue:
            self.replan(f"{node_id} left its old work")

    def see_epoch(self, epoch: int) -> None:
        """Never assign an epoch that a node has seen, even if the store lost it."""
        self._epoch = max(self._epoch, epoch)

    def request(self, gang: Gang) -> None:
        """Request nodes for `gang`; a repeated request updates all but tag and number of nodes.

        Raises:
            ServiceError: ALREADY_EXISTS, the same gang requested another tag or number of nodes.
        """
        standing = self._gangs.get(gang.key)
        self._log_resize(gang, standing)
        self._measured.request(gang, standing)
        if standing is None or standing.parked:
            self._arrival += 1
            standing = replace(gang, arrival=self._arrival)
        elif standing.tag != gang.tag or not (
            gang.unit_nodes or standing.num_nodes == gang.num_nodes
        ):
            raise already_exists("gang", gang.gang_id)
        batch = gang.batch or standing.batch
        self._gangs[gang.key] = replace(
            standing,
            num_nodes=gang.num_nodes,
            unit_nodes=gang.unit_nodes,
            max_nodes=gang.max_nodes,
            batch=batch,
            needed_time=gang.needed_time,
            node_ids=gang.node_ids,
            tail_nodes=gang.tail_nodes,
        )
        self.replan(f"gang {gang.gang_id} requested")

    def _log_resize(self, gang: Gang, standing: Gang | None) -> None:
        counts = self._measured.balances.get(gang.key, StageBalance()).node_counts
        known = counts.training if counts is not None else gang.num_nodes
        before, after = standing.num_nodes if standing is not None else known, gang.num_nodes
        if before != after and gang.unit_nodes:
            cause = f"gang {gang.gang_id}: {before} -> {after} training nodes"
            self._log(EventKind.RESIZED, cause, run_id=gang.run_id)

    def release(self, key: GangKey, forecast: BatchForecast | None = None, batch: int = 0) -> None:
        """Release a gang's nodes until `batch`, if specified.

        With a `forecast` the policy decides once per batch whether to lend them; without one they
        are free. If they are not lent, the gang is parked: its nodes need no switch when it
        requests them again, unless another gang requested them before.
        """
        if forecast is None:
            self._measured.end(key, batch)
            if not batch:
                self._tails.pop(key, None)
        gang = self._gangs.get(key)
        if gang is None or (gang.parked and forecast is not None):
            return
        decision = (
            _RELEASED if forecast is None else self._measured.lend_or_keep(gang, forecast, batch)
        )
        if decision.lend:
            del self._gangs[key]
        else:
            self._gangs[key] = replace(gang, parked=True, needed_time=None)
            self._log(EventKind.KEPT, f"gang {gang.gang_id}: {decision.cause}", run_id=gang.run_id)
        self.replan("; ".join(filter(None, (f"gang {gang.gang_id} released", decision.cause))))

    def set_tail(self, key: GangKey, tail: Tail, num_rollouts: int) -> None:
        """Note when a gang begins with its next batch."""
        self._tails[key] = tail
        run_id, gang_id = key
        cause = (
            f"gang {gang_id}: begins when {tail.remaining} of {num_rollouts} rollouts remain, "
            f"which {tail.num_kept} nodes generate; expected {tail.seconds:.3g} s"
        )
        self._log(EventKind.TAIL, cause, run_id=run_id)

    def set_run_policy(self, run_id: str, policy: RunPolicy) -> None:
        """Set priority, quota and share of a run."""
        if self._runs.get(run_id) == policy:
            return
        self._runs[run_id] = policy
        cause = (
            f"run {run_id}: priority {policy.priority}, max_nodes {policy.max_nodes}, "
            f"rollout_share {policy.rollout_share:g}"
        )
        self._log(EventKind.POLICY, cause, run_id=run_id)
        self.replan(cause)

    def drain(self, node_id: str, draining: bool) -> None:
        """Start or end the draining of a node, which gets no work.

        Raises:
            ServiceError: NOT_FOUND.
        """
        node = self._node(node_id)
        if node.draining == draining:
            return
        cause = "drain requested" if draining else "drain ended"
        self._put(replace(node, draining=draining), EventKind.DRAINED, cause)
        self.replan(f"{node_id}: {cause}")

    def lose(self, node_ids: Iterable[str]) -> None:
        """Plan without nodes whose lease expired."""
        lost = sorted(node_ids)
        for node_id in lost:
            node = replace(self._nodes[node_id], state=NodeState.LOST)
            self._put(node, EventKind.LOST, "lease expired without a heartbeat")
        if lost:
            self.replan(f"lost {', '.join(lost)}")

    def mark_overdue(self, leave_seconds: float) -> None:
        """Plan without nodes that stay at their old work longer than `leave_seconds`."""
        late = [node for node in self._nodes.values() if is_late(node, self._now, leave_seconds)]
        for node in late:
            cause = f"did not leave its old work within {leave_seconds:g} s"
            self._put(replace(node, overdue=True), EventKind.OVERDUE, cause)
        if late:
            self.replan(f"overdue: {', '.join(sorted(node.node_id for node in late))}")

    def replan(self, cause: str, renewed: Iterable[str] = ()) -> Plan:
        """Apply the policy's plan: each changed assignment gets a new epoch.

        If members of a gang changed or registered again (`renewed`), all of it gets new epochs.
        """
        nodes, again = list(self._nodes.values()), set(renewed)
        plan = self._policy.plan(nodes, list(self._gangs.values()), self._now, self._runs)
        afresh = plan.reformed(nodes, again)
        for node in sorted(nodes, key=lambda node: node.node_id):
            planned = plan.assignments.get(node.node_id, _UNASSIGNED)
            is_new = node.assignment.work != planned.work or node.node_id in again
            if is_new or node.gang_under(planned) in afresh:
                self._assign(node, planned, cause, is_registration=node.node_id in again)
        self._drop_parked(plan)
        self._log_waiting(plan.waiting)
        return plan

    def _assign(
        self, node: Node, planned: Assignment, cause: str, *, is_registration: bool
    ) -> None:
        self._epoch += 1
        left_gang = bool(node.assignment.gang_id) and not planned.gang_id
        node = replace(
            node,
            assignment=replace(planned, epoch=self._epoch),
            assigned_time=self._now,
            registered_epoch=self._epoch if is_registration else node.registered_epoch,
            released_time=self._now if left_gang else node.released_time,
        )
        self._put(node, EventKind.ASSIGNED, cause)

    def _drop_parked(self, plan: Plan) -> None:
        """Delete parked gangs whose nodes another gang got."""
        parked = {key for key, gang in self._gangs.items() if gang.parked}
        if parked:
            nodes = self._nodes.values()
            kept = {n.gang_under(plan.assignments.get(n.node_id, _UNASSIGNED)) for n in nodes}
            for key in parked - kept:
                del self._gangs[key]

    def _log_waiting(self, waiting: Mapping[GangKey, str]) -> None:
        """Log why a gang waits, when that changes."""
        for key, gang in self._gangs.items():
            reason = waiting.get(key, "")
            if reason == gang.waits_for:
                continue
            self._gangs[key] = replace(gang, waits_for=reason)
            if reason:
                self._log(EventKind.WAITING, f"gang {gang.gang_id}: {reason}", run_id=gang.run_id)

    def _all_nodes(self) -> Iterable[Node]:
        return self._nodes.values()

    def _put(self, node: Node, kind: EventKind, cause: str) -> None:
        self._log(kind, cause, node=self._keep(node))

    def _keep(self, node: Node) -> Node:
        if self._own_nodes is None:
            self._nodes = self._own_nodes = dict(self._nodes)
        self._own_nodes[node.node_id] = node
        return node

    def _log(
        self, kind: EventKind, cause: str, run_id: str = "", *, node: Node | None = None
    ) -> None:
        self._sequence += 1
        event = AllocationEvent(
            sequence=self._sequence,
            time=self._now,
            kind=kind,
            cause=cause,
            node=node,
            run_id=run_id,
        )
        self.events.append(event)

    def _node(self, node_id: str) -> Node:
        if not node_id:
            raise invalid_argument("node_id", node_id, "give the node's id")
        if node_id not in self._nodes:
            raise not_found("node", node_id)
        return self._nodes[node_id]


_UNASSIGNED = Assignment()


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
