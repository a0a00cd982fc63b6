"""Every change of state the scheduler can make, as pure steps on a draft that is then committed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from scheduler.model.lending import Lending, Outlook, Stake, Verdict
from scheduler.model.records import (
    ROLLOUT,
    AllocationEvent,
    Assignment,
    EventKind,
    Gang,
    GangKey,
    Node,
    NodeReport,
    NodeState,
    RunPolicy,
    State,
)
from scheduler.model.split_advice import Balance, Team
from scheduler.policy.allocation_policy import AllocationPolicy, Plan
from scheduler.policy.switch_stats import switched, toggle_seconds
from services.chassis.errors import already_exists, invalid_argument, not_found, stale_epoch

__all__ = ["Draft"]

_UNCONDITIONAL = Verdict(lend=True, cause="")


class Draft:
    """A copy of the state to change; nothing is true before the store has committed it.

    Args:
        state: what holds now.
        policy: decides who does what after each change.
        now: seconds since 1970.
    """

    def __init__(self, state: State, policy: AllocationPolicy, now: float) -> None:
        self._nodes = state.nodes
        self._own_nodes: dict[str, Node] | None = None
        self._gangs = dict(state.gangs)
        self._runs = dict(state.runs)
        self._lendings = dict(state.lendings)
        self._balances = dict(state.balances)
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
        self._own_nodes = None  # handed out: the next change copies
        return State(
            nodes=self._nodes,
            gangs=dict(self._gangs),
            runs=dict(self._runs),
            lendings=dict(self._lendings),
            balances=dict(self._balances),
            last_epoch=self._epoch,
            last_arrival=self._arrival,
            last_sequence=self._sequence,
        )

    def register(self, *nodes: Node) -> None:
        """Let nodes join or come back; each always gets a new epoch, and so does its gang.

        Only what a node says of itself is taken from `nodes`; an operator's drain stays.
        """
        causes = []
        for node in nodes:
            known = self._nodes.get(node.node_id, node)
            cause = "came back" if node.node_id in self._nodes else "joined"
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
        """Take a heartbeat: the node stands at `state` for `reported`, and knows epoch `known`.

        Args:
            node_id: the node.
            state: where it stands.
            reported: epoch it has taken up.
            known: newest epoch it was told.
            switch_seconds: what the switch to where it stands took.
            report: what its agent measured.

        Raises:
            ServiceError: NOT_FOUND, or ABORTED / STALE_EPOCH: the node agent must register again.
        """
        node = self._node(node_id)
        _check_epochs(node, reported, known)
        if report is not None:
            node = self._keep(replace(node, report=report))
        if (state, reported) == (node.state, node.reported_epoch):
            return
        current = reported == node.assignment.epoch
        if switch_seconds is not None and current and node.warm:
            node = switched(node, switch_seconds)
        was_overdue = node.overdue
        node = replace(
            node,
            state=state,
            reported_epoch=reported,
            leaving=state is NodeState.DRAINING and current,
            overdue=was_overdue and not current,
            warm=node.warm or state in (NodeState.ACTIVE, NodeState.IDLE),
        )
        self._put(node, EventKind.REPORTED, "leaving" if node.leaving else "heartbeat")
        if node.leaving:
            self.replan(f"{node_id} is leaving")
        elif was_overdue and current:
            self.replan(f"{node_id} left its old work")

    def see_epoch(self, epoch: int) -> None:
        """Never give out an epoch that somebody has already seen, even if the store forgot it."""
        self._epoch = max(self._epoch, epoch)

    def request(self, gang: Gang) -> None:
        """Let `gang` ask for nodes; asking again changes nothing but `needed_time` and `batch`.

        Raises:
            ServiceError: ALREADY_EXISTS, the same gang asked for something else.
        """
        standing = self._gangs.get(gang.key)
        self._measure(gang, standing)
        if standing is None or standing.parked:
            self._arrival += 1
            standing = replace(gang, arrival=self._arrival)
        elif (standing.tag, standing.num_nodes) != (gang.tag, gang.num_nodes):
            raise already_exists("gang", gang.gang_id)
        batch = gang.batch or standing.batch
        self._gangs[gang.key] = replace(standing, batch=batch, needed_time=gang.needed_time)
        self.replan(f"gang {gang.gang_id} requested")

    def release(self, key: GangKey, outlook: Outlook | None = None, batch: int = 0) -> None:
        """Let a gang give its nodes back until it wants them for `batch`, if that is told.

        With an `outlook` the policy judges whether lending them pays, once for each batch; without
        one they are lent. If not, the gang is parked: its nodes need no switch when it asks again,
        and are anybody's who asks before. A gang that does not exist has no nodes.
        """
        if outlook is None:
            self._forget(key, batch)
        gang = self._gangs.get(key)
        if gang is None or (gang.parked and outlook is not None):
            return
        verdict = _UNCONDITIONAL if outlook is None else self._judge(gang, outlook, batch)
        if verdict.lend:
            del self._gangs[key]
        else:
            self._gangs[key] = replace(gang, parked=True, needed_time=None)
            self._log(EventKind.KEPT, f"gang {gang.gang_id}: {verdict.cause}", run_id=gang.run_id)
        self.replan("; ".join(filter(None, (f"gang {gang.gang_id} released", verdict.cause))))

    def set_run_policy(self, run_id: str, policy: RunPolicy) -> None:
        """Give a run its place among the others."""
        if self._runs.get(run_id) == policy:
            return
        self._runs[run_id] = policy
        cause = (
            f"run {run_id}: priority {policy.priority}, max_nodes {policy.max_nodes}, "
            f"rollout_share {policy.rollout_share:g}"
        )
        self._log(EventKind.POLICY, cause, run_id=run_id)
        self.replan(cause)

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

    def give_up(self, leave_seconds: float) -> None:
        """Plan without the nodes that were given to a gang so long ago and are still elsewhere."""
        late = [node for node in self._nodes.values() if self._is_late(node, leave_seconds)]
        for node in late:
            cause = f"did not leave its old work within {leave_seconds:g} s"
            self._put(replace(node, overdue=True), EventKind.OVERDUE, cause)
        if late:
            self.replan(f"overdue: {', '.join(sorted(node.node_id for node in late))}")

    def replan(self, cause: str, renewed: Iterable[str] = ()) -> Plan:
        """Carry the policy's plan out: each changed assignment gets its own new epoch.

        A gang whose members changed, or one of whose members registered again (`renewed`), starts
        afresh: all of it gets new epochs.
        """
        nodes, again = list(self._nodes.values()), set(renewed)
        plan = self._policy.plan(nodes, list(self._gangs.values()), self._now, self._runs)
        afresh = plan.reformed(nodes, again)
        for node in sorted(nodes, key=lambda node: node.node_id):
            wanted = plan.assignments.get(node.node_id, _NOTHING)
            is_new = node.assignment.work != wanted.work or node.node_id in again
            if is_new or node.gang_under(wanted) in afresh:
                self._assign(node, wanted, cause, is_registration=node.node_id in again)
        self._dissolve(plan)
        self._tell_waiting(plan.waiting)
        return plan

    def _assign(self, node: Node, wanted: Assignment, cause: str, *, is_registration: bool) -> None:
        self._epoch += 1
        left_gang = bool(node.assignment.gang_id) and not wanted.gang_id
        node = replace(
            node,
            assignment=replace(wanted, epoch=self._epoch),
            assigned_time=self._now,
            registered_epoch=self._epoch if is_registration else node.registered_epoch,
            released_time=self._now if left_gang else node.released_time,
        )
        self._put(node, EventKind.ASSIGNED, cause)

    def _dissolve(self, plan: Plan) -> None:
        """Forget the parked gangs whose nodes somebody wanted."""
        parked = {key for key, gang in self._gangs.items() if gang.parked}
        if parked:
            nodes = self._nodes.values()
            kept = {n.gang_under(plan.assignments.get(n.node_id, _NOTHING)) for n in nodes}
            for key in parked - kept:
                del self._gangs[key]

    def _tell_waiting(self, waiting: Mapping[GangKey, str]) -> None:
        """Log why a gang waits, whenever that changed."""
        for key, gang in self._gangs.items():
            reason = waiting.get(key, "")
            if reason == gang.waits_for:
                continue
            self._gangs[key] = replace(gang, waits_for=reason)
            if reason:
                self._log(EventKind.WAITING, f"gang {gang.gang_id}: {reason}", run_id=gang.run_id)

    def _judge(self, gang: Gang, outlook: Outlook, batch: int) -> Verdict:
        """What is done with the nodes until `batch`; what was done before has been measured."""
        key = gang.key
        lending = self._lendings.get(key, Lending())
        if lending.is_judged(batch):
            self._balances[key] = self._balances.get(key, Balance()).waits()
            lend = lending.lends or not self._members(gang)
            cause = f"{'lent' if lend else 'kept'}: judged for batch {batch} already"
            return Verdict(lend=lend, cause=cause)
        lending = lending.ended(self._now, outlook.done)
        verdict = self._verdict(gang, lending, outlook)
        self._lendings[key] = lending.begun(verdict, outlook, self._now, batch)
        self._done(gang, is_lent=verdict.lend)
        return verdict

    def _verdict(self, gang: Gang, lending: Lending, outlook: Outlook) -> Verdict:
        """The policy's, where there is a choice."""
        lendable = self._lendable(gang)
        if not self._members(gang):
            return Verdict(lend=True, cause="it has no nodes", chosen=False)
        if not lendable:
            return Verdict(lend=False, cause="kept: its nodes cannot roll out", chosen=False)
        stake = Stake(
            outlook=outlook,
            num_dedicated=self._num_generating(gang.run_id),
            num_lent=len(lendable),
            toggle_seconds=toggle_seconds(lendable, gang.tag),
        )
        return self._policy.judge(lending, stake)

    def _measure(self, gang: Gang, standing: Gang | None) -> None:
        """Tell of a request: of a new batch, unless it repeats one that stands."""
        key, is_full = gang.key, gang.needed_time is None
        is_new = standing is None or standing.parked or gang.batch not in (0, standing.batch)
        if (lending := self._lendings.get(key)) is not None:
            lending = lending.asked(gang.batch) if is_new else lending
            self._lendings[key] = lending.filled(self._now) if is_full else lending
        if is_new:
            self._done(gang, is_lent=False)
        if is_full:
            self._balances[key] = self._balances.get(key, Balance()).full(self._now)

    def _done(self, gang: Gang, *, is_lent: bool) -> None:
        """The gang has done with its batch, if it had one; tell if that changes the advice."""
        team = Team(
            generating=self._num_generating(gang.run_id),
            training=gang.num_nodes,
            lent=len(self._lendable(gang)) if is_lent else 0,
        )
        before = self._balances.get(gang.key, Balance())
        self._balances[gang.key] = after = before.done(team, self._now)
        if after.advice != before.advice:
            self._log(EventKind.ADVICE, f"gang {gang.gang_id}: {after.cause}", run_id=gang.run_id)

    def _forget(self, key: GangKey, batch: int) -> None:
        """What follows is no cycle; without a `batch` that the gang goes on to, all is over."""
        lending, balance = self._lendings.pop(key, None), self._balances.pop(key, None)
        if batch and lending is not None:
            self._lendings[key] = lending.abandoned()
        if batch and balance is not None:
            self._balances[key] = balance.waits()

    def _num_generating(self, run_id: str) -> int:
        """Nodes that generate for the run; its gangs hold the others."""
        return sum(
            node.assignment.tag == ROLLOUT and node.assigned_run == run_id
            for node in self._nodes.values()
        )

    def _lendable(self, gang: Gang) -> list[Node]:
        return [node for node in self._members(gang) if ROLLOUT in node.capability_tags]

    def _members(self, gang: Gang) -> list[Node]:
        return [node for node in self._nodes.values() if node.gang_key == gang.key]

    def _is_late(self, node: Node, leave_seconds: float) -> bool:
        """Whether a gang waits for a node that is still at its old work."""
        if node.assigned_time is None or not node.assignment.gang_id or not node.available:
            return False
        there = node.reported_epoch == node.assignment.epoch or node.state is NodeState.IDLE
        return not there and self._now - node.assigned_time >= leave_seconds

    def _put(self, node: Node, kind: EventKind, cause: str) -> None:
        self._log(kind, cause, node=self._keep(node))

    def _keep(self, node: Node) -> Node:
        if self._own_nodes is None:
            self._nodes = self._own_nodes = dict(self._nodes)
        self._own_nodes[node.node_id] = node
        return node

    def _log(
        self, kind: EventKind, cause: str, *, node: Node | None = None, run_id: str = ""
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
            raise invalid_argument("node_id", node_id, "name the node")
        if node_id not in self._nodes:
            raise not_found("node", node_id)
        return self._nodes[node_id]


_NOTHING = Assignment()


def _check_epochs(node: Node, reported: int, known: int) -> None:
    """Refuse a heartbeat of an earlier life of the node's agent, or of one that went back."""
    current = node.assignment.epoch
    if node.state is NodeState.LOST or not node.registered_epoch <= known <= current:
        raise stale_epoch(f"node {node.node_id}", known, current)
    if not node.reported_epoch <= reported <= known:
        raise stale_epoch(f"report of node {node.node_id}", reported, node.reported_epoch)
