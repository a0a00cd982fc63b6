"""Random mixes of gangs, runs and failures: what must hold after every change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import get_args

from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler.model.lending_state import (
    BatchForecast,
    LendingDecision,
    LendingState,
)
from scheduler.model.records import Assignment, Gang, Node, RunPolicy, State, Worker
from scheduler.policy.allocation_policy import AllocationPolicy, LendingMode, Plan, PreemptivePolicy
from scheduler.policy.lending import LendingInputs
from scheduler.pool.state_transaction import StateTransaction
from tests.lib.scheduler.support import BOTH, RUN, after, gang, node

OTHER = "other"
LIMIT = 2
"""Nodes that the other run may have once it has a policy."""
OUTLOOK = BatchForecast(remaining_rollouts=1, batch_rollouts=2)

Step = tuple[str, int, int]


class HalfPolicy:
    """A policy that deals nodes out to gangs in turn, whole or not: the negative control."""

    def __init__(self, **_: object) -> None:
        pass

    def plan(
        self,
        nodes: Sequence[Node],
        gangs: Sequence[Gang],
        now: float,
        runs: Mapping[str, RunPolicy] = MappingProxyType({}),
    ) -> Plan:
        """One node to each gang in turn, until all have enough or none is left."""
        free = [entry for entry in nodes if entry.available and "train" in entry.capability_tags]
        turns = [entry for rank in range(len(free)) for entry in gangs if rank < entry.num_nodes]
        dealt = {
            node.node_id: Assignment(
                tag="train", gang_id=entry.gang_id, run_id=entry.run_id, rank_offset=rank
            )
            for rank, (node, entry) in enumerate(zip(free, turns, strict=False))
        }
        return Plan(assignments=dealt)

    def decide_lending(self, lending: LendingState, inputs: LendingInputs) -> LendingDecision:
        """Always lend."""
        return LendingDecision(lend=True)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["request", "release", "lose", "register", "drain", "undrain", "policy"]),
        st.integers(0, 5),
        st.integers(1, 4),
    ),
    max_size=12,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(steps=STEPS, lending=st.sampled_from(get_args(LendingMode)))
@example(steps=[("request", 1, 2), ("release", 1, 1), ("policy", 1, 1)], lending="never")
def test_gangs_are_whole_and_never_share(steps: list[Step], lending: LendingMode) -> None:
    """Random histories: 0 partial holds, 0 epochs reused, 0 quotas broken, 0 runs starved by a
    gang of their own that is parked."""
    assert violations(PreemptivePolicy(lending=lending), steps) == []


def test_checker_sees_partial_holds() -> None:
    """Negative control: the same checker fails a policy that hands nodes out one by one."""
    assert "partial" in violations(HalfPolicy(), [("request", 0, 4), ("request", 2, 4)])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(steps=STEPS)
def test_every_gang_that_fits_gets_its_turn(steps: list[Step]) -> None:
    """Whatever happened: when holders release in turn, all that fit are served. No deadlock."""
    policy = PreemptivePolicy()
    state = carried_out(policy, [*FULL_POOL, *steps], State())
    assert unserved(policy, state) == []


def test_checker_sees_deadlocks() -> None:
    """Negative control: two gangs that hold half of what both need wait for ever."""
    steps = [("request", 0, 4), ("request", 2, 4)]
    state = carried_out(HalfPolicy(), [*FULL_POOL, *steps], State())
    assert unserved(HalfPolicy(), state) == ["0", "2"]


def test_equals_are_served_in_the_order_of_arrival() -> None:
    """A large gang is not starved by small ones that come later."""
    policy = PreemptivePolicy()
    steps = [("request", 0, 3), ("request", 2, 4), ("request", 4, 2)]
    state = carried_out(policy, [*FULL_POOL, *steps], State())
    assert [key for key in state.gangs if state.members(state.gangs[key])] == [(RUN, "0")]
    state = carried_out(policy, [("release", 0, 1)], state)
    assert [key for key in state.gangs if state.members(state.gangs[key])] == [(RUN, "2")]


FULL_POOL: list[Step] = [("register", index, 1) for index in range(6)]


def violations(policy: AllocationPolicy, steps: list[Step]) -> list[str]:
    """What goes wrong while `steps` are carried out one by one."""
    state = carried_out(policy, FULL_POOL, State())
    found, epochs = [], set()
    for step in steps:
        before, state = state, carried_out(policy, [step], state)
        found += _partial(state) + _beyond_quota(state) + _starved(state)
        for name, entry in state.nodes.items():
            if before.nodes[name].assignment == entry.assignment:
                continue
            if entry.assignment.epoch in epochs:
                found.append("reused epoch")
            epochs.add(entry.assignment.epoch)
    return found


def _release(key: tuple[str, str]) -> Callable[[StateTransaction], None]:
    return lambda tx: tx.release(key, OUTLOOK)


def unserved(policy: AllocationPolicy, state: State) -> list[str]:
    """The gangs that could have been served and never were, while holders released in turn."""
    while True:
        asking = [entry for entry in state.gangs.values() if not entry.parked]
        holders = [entry.key for entry in asking if _is_whole(state, entry)]
        if not holders:
            break
        for key in holders:
            state = after(state, _release(key), policy)
    return [entry.gang_id for entry in asking if _fits(state, entry)]


def carried_out(policy: AllocationPolicy, steps: list[Step], state: State) -> State:
    """The state after `steps`."""
    for step in steps:
        tx = StateTransaction(state, policy, 0.0)
        _carry_out(tx, state, *step)
        state = tx.state
    return state


def _carry_out(tx: StateTransaction, state: State, kind: str, index: int, size: int) -> None:
    name, run_id = f"node-{index}", (RUN, OTHER)[index % 2]
    match kind:
        case "request" if (run_id, str(index)) not in state.gangs:
            tx.request(gang(str(index), size, run_id=run_id))
        case "release":
            tx.release((run_id, str(index)), OUTLOOK if size % 2 else None)
        case "lose":
            tx.lose([name])
        case "register":
            tx.register(_node(name, index))
        case "drain" | "undrain":
            tx.drain(name, kind == "drain")
        case "policy":
            limit = LIMIT if index % 2 else 0
            tx.set_run_policy(run_id, RunPolicy(priority=size % 3, max_nodes=limit))


def _node(name: str, index: int) -> Node:
    """Four that can do all, the first of them for one run alone, the others for both; one that can
    only roll out, one that can only train."""
    tags = BOTH if index < 4 else BOTH[index % 2 :][:1]
    entry = node(name, *tags)
    runs = (RUN, OTHER) if index else (RUN,)
    workers = tuple(
        Worker(tag=tag, address=f"{tag}-{run}", run_id=run) for tag in tags for run in runs
    )
    return replace(entry, workers=workers)


def _partial(state: State) -> list[str]:
    found = []
    for entry in state.gangs.values():
        members = [member for member in state.members(entry) if member.available]
        ranks = [member.assignment.rank_offset for member in members]
        if len(members) not in (0, entry.num_nodes):
            found.append("partial")
        elif ranks != list(range(len(members))):
            found.append("ranks")
        if any(member.assignment.tag != entry.tag for member in members):
            found.append("wrong work")
    return found


def _starved(state: State) -> list[str]:
    """The runs with a parked gang and no generating node: the gang would be parked forever."""
    members = [member for member in state.nodes.values() if member.available]
    served = {member.assigned_run for member in members if member.assignment.tag == "rollout"}
    parked = {entry.run_id for entry in state.gangs.values() if entry.parked}
    return [f"{run_id} starves" for run_id in parked - served]


def _beyond_quota(state: State) -> list[str]:
    busy = Counter(
        entry.assigned_run
        for entry in state.nodes.values()
        if entry.assignment.tag and entry.available
    )
    limits = {run_id: policy.max_nodes for run_id, policy in state.runs.items()}
    return [f"quota of {run}" for run, number in busy.items() if 0 < limits.get(run, 0) < number]


def _is_whole(state: State, entry: Gang) -> bool:
    return len(state.members(entry)) == entry.num_nodes


def _fits(state: State, entry: Gang) -> bool:
    able = [member for member in state.nodes.values() if member.available]
    able = [member for member in able if entry.run_id in member.runs_for(entry.tag)]
    limit = state.runs.get(entry.run_id, RunPolicy()).max_nodes or len(able)
    return entry.num_nodes <= min(len(able), limit)
