"""Changes of the state beyond what the policy decides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from seamflow.scheduler.v1.scheduler_service_pb2 import NodeReport

from scheduler.model.records import EventKind, NodeState, RunPolicy, State
from scheduler.policy.allocation_policy import PreemptivePolicy
from scheduler.pool.state_transaction import StateTransaction
from tests.lib.scheduler.support import BOTH, RUN, after, gang, node

SECONDS = 30.0


def late_pool(*more: str) -> State:
    """A gang was given the node "a", which still rolls out; `more` could do its work too."""

    def fill(tx: StateTransaction) -> None:
        tx.register(node("a", *BOTH, train_priority=1.0), *(node(name, *BOTH) for name in more))

    def work(tx: StateTransaction) -> None:
        for name, entry in tx.state.nodes.items():
            epoch = entry.assignment.epoch
            tx.report(name, NodeState.ACTIVE, epoch, epoch)
        tx.request(gang("g", 1))

    return after(after(State(), fill), work, now=100.0)


def test_node_that_does_not_leave_its_old_work_is_done_without() -> None:
    """The gang moves, the log has an event, and the node is available again when it has left."""
    state = late_pool("b")
    assert state.nodes["a"].assignment.gang_id == "g"
    tx = StateTransaction(state, PreemptivePolicy(), 100.0 + SECONDS)
    tx.mark_overdue(SECONDS)
    state = tx.state
    assert tx.events[0].kind is EventKind.OVERDUE
    assert tx.events[0].cause == "did not leave its old work within 30 s"
    assert (state.nodes["a"].overdue, state.nodes["a"].assignment.tag) == (True, "")
    assert state.nodes["b"].assignment.gang_id == "g"
    stale = state.nodes["a"].reported_epoch
    current = state.nodes["a"].assignment.epoch
    state = after(
        state,
        lambda tx: tx.report("a", NodeState.DRAINING, stale, current),
        now=140.0,
    )
    assert state.nodes["a"].overdue
    state = after(
        state,
        lambda tx: tx.report("a", NodeState.IDLE, current, current),
        now=150.0,
    )
    assert (state.nodes["a"].overdue, state.nodes["a"].assignment.tag) == (False, "rollout")


def test_without_the_deadline_a_gang_waits_for_ever() -> None:
    """Negative control: the same node, never given up, keeps the gang though another would do."""
    state = after(late_pool("b"), lambda tx: tx.replan("time passed"), now=1e6)
    assert state.nodes["a"].assignment.gang_id == "g"
    assert not state.granted(state.gangs[RUN, "g"])


def test_gang_waits_when_no_other_node_fits() -> None:
    """It holds no node while it waits, and logs the reason."""
    state = after(late_pool(), lambda tx: tx.mark_overdue(SECONDS), now=100.0 + SECONDS)
    entry = state.gangs[RUN, "g"]
    assert state.members(entry) == []
    assert entry.waits_for.startswith("nodes: 0 can do train")


@pytest.mark.parametrize(
    ("state", "taken_up", "seconds"),
    [
        (NodeState.ACTIVATING, True, 1e6),
        (NodeState.ACTIVE, True, 1e6),
        (NodeState.IDLE, False, 1e6),
        (NodeState.DRAINING, False, SECONDS - 1),
    ],
)
def test_node_is_late_only_while_it_does_its_old_work(
    state: NodeState, taken_up: bool, seconds: float
) -> None:
    """One that has left, or has time left, is not given up."""
    pool = late_pool("b")
    before, expected = pool.nodes["a"].reported_epoch, pool.nodes["a"].assignment.epoch
    epoch = expected if taken_up else before
    pool = after(pool, lambda tx: tx.report("a", state, epoch, expected), now=101.0)
    pool = after(pool, lambda tx: tx.mark_overdue(SECONDS), now=100.0 + seconds)
    assert pool.nodes["a"].assignment.gang_id == "g"


def test_the_reason_of_a_wait_is_logged_once() -> None:
    """Not at each look, but again when the reason is another one."""
    state, message = State(), []
    changes: list[Callable[[StateTransaction], object]] = [
        lambda tx: tx.request(gang("g", 1)),
        lambda tx: tx.replan("look"),
        lambda tx: tx.set_run_policy(RUN, RunPolicy(max_nodes=1, priority=2)),
        lambda tx: tx.request(gang("h", 2)),
        lambda tx: tx.register(node("a", *BOTH)),
    ]
    for change in changes:
        tx = StateTransaction(state, PreemptivePolicy(), 0.0)
        change(tx)
        state = tx.state
        message += [(event.kind.value, event.cause) for event in tx.events if event.node is None]
    assert message == [
        ("waiting", "gang g: nodes: 0 can do train for run run, requested 1"),
        ("policy", "run run: priority 2, max_nodes 1, rollout_share 1"),
        ("waiting", "gang h: quota: run run may have 1 nodes, requested 2"),
    ]
    assert state.gangs[RUN, "g"].waits_for == ""


def test_report_alone_is_no_change_that_must_be_stored() -> None:
    """It is kept for the choice of nodes, and equal states need no commit."""
    state = after(State(), lambda tx: tx.register(node("a", *BOTH)))
    tx = StateTransaction(state, PreemptivePolicy(), 1.0)
    epoch = state.nodes["a"].assignment.epoch
    tx.report("a", NodeState.IDLE, 0, epoch, report=NodeReport(num_turns=3))
    assert tx.state == state
    assert tx.state.nodes["a"].num_turns == 3
    assert tx.events == []


def test_many_nodes_register_concurrently() -> None:
    """One plan for all; each has its own epoch."""
    tx = StateTransaction(State(), PreemptivePolicy(), 0.0)
    tx.register(node("a", "rollout"), node("b", *BOTH))
    epochs = [entry.assignment.epoch for entry in tx.state.nodes.values()]
    assert epochs == [entry.registered_epoch for entry in tx.state.nodes.values()] == [1, 2]


def test_a_transaction_does_not_change_its_base_state() -> None:
    """Neither the state before nor one that was read in between changes."""
    state = after(State(), lambda tx: tx.register(node("a", *BOTH)))
    tx = StateTransaction(state, PreemptivePolicy(), 0.0)
    tx.request(gang("g", 1))
    between = tx.state
    tx.drain("a", True)
    assert state.nodes["a"].assignment.tag == "rollout"
    assert between.nodes["a"].assignment.tag == "train"
    assert tx.state.nodes["a"].assignment.tag == ""
