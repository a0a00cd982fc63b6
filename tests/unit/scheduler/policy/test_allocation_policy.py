"""Who does what, as pure functions."""

from __future__ import annotations

import pytest

from scheduler.model.records import Assignment, Node, NodeState, RunPolicy, Worker
from scheduler.policy.allocation_policy import LendingMode, Plan, PreemptivePolicy, load_policy
from services.chassis.errors import ConfigError
from tests.lib.scheduler.support import BOTH, RUN, gang, node

POLICY = PreemptivePolicy()
OTHER = "other"


def test_nodes_outside_of_gangs_do_rollout() -> None:
    """Every node that can rolls out; one that could train counts as lent."""
    nodes = [node("a", "rollout"), node("b", *BOTH), node("c", "train")]
    plan = POLICY.plan(nodes, [], 0.0)
    assert plan.assignments == {
        "a": Assignment(tag="rollout"),
        "b": Assignment(tag="rollout", lent=True),
        "c": Assignment(),
    }


def test_gang_prefers_idle_then_priority_then_name() -> None:
    """An idle node is taken before a busy one, a better one before a worse, ties by name."""
    busy = Assignment(tag="rollout", epoch=1)
    nodes = [
        node("a", *BOTH, assignment=busy, train_priority=1.0),
        node("b", *BOTH, assignment=busy, train_priority=2.0),
        node("c", *BOTH, assignment=busy, train_priority=2.0),
        node("d", "train"),
    ]
    for expected, taken in ((1, {"d"}), (2, {"d", "b"}), (3, {"d", "b", "c"})):
        plan = POLICY.plan(nodes, [gang("g", expected)], 0.0)
        assert _members(plan, "g") == taken


def test_ranks_follow_priority_and_name() -> None:
    """The same nodes always get the same ranks, whichever were idle."""
    nodes = [node("a", *BOTH), node("b", *BOTH, train_priority=1.0)]
    plan = POLICY.plan(nodes, [gang("g", 2)], 0.0)
    ranks = {name: entry.rank_offset for name, entry in plan.assignments.items()}
    assert ranks == {"b": 0, "a": 1}
    assert {entry.world_size for entry in plan.assignments.values()} == {2}


def test_gang_that_does_not_fit_holds_nothing() -> None:
    """Its candidates do rollout, and a smaller gang that fits is placed."""
    nodes = [node("a", *BOTH), node("b", *BOTH)]
    plan = POLICY.plan(nodes, [gang("big", 3, 1), gang("small", 1, 2)], 0.0)
    assert plan.unplaced == ((RUN, "big"),)
    assert len(_members(plan, "small")) == 1


def test_waiting_gang_is_not_starved_by_later_ones() -> None:
    """A gang that will fit once others release keeps later gangs from taking its nodes."""
    held = Assignment(tag="train", epoch=1, gang_id="first", world_size=1)
    nodes = [node("a", *BOTH, assignment=held), node("b", *BOTH)]
    gangs = [gang("first", 1, 1), gang("big", 2, 2), gang("late", 1, 3)]
    plan = POLICY.plan(nodes, gangs, 0.0)
    assert plan.unplaced == ((RUN, "big"), (RUN, "late"))
    assert plan.assignments["b"].tag == "rollout"


def test_gang_waits_for_its_time() -> None:
    """Nodes stay lent until the time they are needed."""
    nodes, expected = [node("a", *BOTH)], [gang("g", 1, needed_time=10.0)]
    assert POLICY.plan(nodes, expected, 9.0).assignments["a"].tag == "rollout"
    assert POLICY.plan(nodes, expected, 10.0).assignments["a"].tag == "train"


@pytest.mark.parametrize(("now", "tag"), [(104.0, ""), (105.0, "rollout"), (50.0, "rollout")])
def test_node_rests_before_it_is_lent_again(now: float, tag: str) -> None:
    """Minimum dwell keeps a node from toggling; a clock set back does not keep it idle."""
    policy = PreemptivePolicy(min_dwell_seconds=5.0)
    assert policy.plan([node("a", *BOTH, released_time=100.0)], [], now).assignments["a"].tag == tag


def test_lending_can_be_switched_off() -> None:
    """Without lending only nodes that cannot train roll out."""
    plan = PreemptivePolicy(lending="never").plan([node("a", *BOTH), node("b", "rollout")], [], 0.0)
    assert {name: entry.tag for name, entry in plan.assignments.items()} == {
        "a": "",
        "b": "rollout",
    }


@pytest.mark.parametrize("gone", [{"state": NodeState.LOST}, {"draining": True}, {"leaving": True}])
def test_unavailable_nodes_get_nothing(gone: dict[str, object]) -> None:
    """A silent, drained or leaving node is no candidate."""
    plan = POLICY.plan([node("a", *BOTH, **gone)], [gang("g", 1)], 0.0)
    assert plan.assignments == {}
    assert plan.unplaced == ((RUN, "g"),)


def shared(name: str, *tags: str, run_id: str = RUN) -> Node:
    """A node that rolls out for `run_id`, and can for both runs."""
    return node(
        name,
        *tags,
        workers=tuple(
            Worker(tag=tag, address=f"{tag}-{run}", run_id=run)
            for run in (RUN, OTHER)
            for tag in tags
        ),
        assignment=Assignment(tag="rollout", run_id=run_id, epoch=1),
    )


def plan_beside_parked(policy: PreemptivePolicy, *others: Node, max_nodes: int = 0) -> Plan:
    """What `others` do, and the node "t" that a parked gang of `RUN` has."""
    held = Assignment(tag="train", epoch=1, gang_id="g", world_size=1)
    nodes = [node("t", *BOTH, assignment=held), *others]
    runs = {RUN: RunPolicy(max_nodes=max_nodes)}
    return policy.plan(nodes, [gang("g", 1, parked=True)], 0.0, runs)


def test_parked_gang_keeps_its_nodes_while_other_nodes_generate() -> None:
    """For its own run."""
    plan = plan_beside_parked(POLICY, node("c", "rollout"))
    assert {name: entry.tag for name, entry in plan.assignments.items()} == {
        "t": "train",
        "c": "rollout",
    }


def test_parked_gang_does_not_wait_for_a_node_that_generates_for_others() -> None:
    """The shared node stays with the other run, which has no other: the gang's rolls out."""
    plan = plan_beside_parked(POLICY, shared("c", "rollout", run_id=OTHER))
    assert plan.assignments["c"].run_id == OTHER
    assert plan.assignments["t"].tag == "rollout"


@pytest.mark.parametrize("lending", ["gated", "never"])
def test_parked_gang_does_not_take_the_quota_of_those_that_generate(lending: LendingMode) -> None:
    """One node is all that the run may have, and that one generates."""
    policy = PreemptivePolicy(lending=lending)
    plan = plan_beside_parked(policy, node("c", "rollout"), max_nodes=1)
    tags = sorted(entry.tag for entry in plan.assignments.values())
    assert tags == ["", "rollout"]


def test_policy_is_loaded_by_name_or_path() -> None:
    """A built-in by name, a plug-in by path; anything else is rejected."""
    chosen = load_policy("preemptive", lending="never", min_dwell_seconds=1.0)
    assert chosen == PreemptivePolicy(lending="never", min_dwell_seconds=1.0)
    path = "tests.unit.scheduler.test_mixes:HalfPolicy"
    assert type(load_policy(path, lending="always", min_dwell_seconds=0.0)).__name__ == "HalfPolicy"
    with pytest.raises(ConfigError, match="give one of gated, always, never"):
        load_policy("preemptive", lending="sometimes", min_dwell_seconds=0.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean preemptive"):
        load_policy("premptive", lending="always", min_dwell_seconds=0.0)


def _members(plan: Plan, name: str) -> set[str]:
    return {key for key, entry in plan.assignments.items() if entry.gang_id == name}
