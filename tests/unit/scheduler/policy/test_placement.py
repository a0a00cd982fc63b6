"""Gangs of several runs on one pool: any tag, priorities, quotas, the choice of nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from seamflow.scheduler.v1.scheduler_service_pb2 import NodeReport

from scheduler.model.records import Assignment, RunPolicy, Worker
from scheduler.policy.allocation_policy import Plan, PreemptivePolicy
from tests.lib.scheduler.support import BOTH, RUN, gang, node

POLICY = PreemptivePolicy()
OTHER = "other"


def held(name: str, run_id: str = "", size: int = 1) -> dict[str, Assignment]:
    """The field of a node that is in a gang."""
    return {
        "assignment": Assignment(tag="train", epoch=1, gang_id=name, world_size=size, run_id=run_id)
    }


def shared(*tags: str) -> dict[str, tuple[Worker, ...]]:
    """The field of a node with workers of both runs."""
    return {
        "workers": tuple(
            Worker(tag=tag, address=f"{run}:{tag}", run_id=run)
            for tag in tags
            for run in (RUN, OTHER)
        )
    }


def members(plan: Plan, name: str) -> set[str]:
    """The nodes of a gang."""
    return {key for key, entry in plan.assignments.items() if entry.gang_id == name}


@pytest.mark.parametrize("tag", ["train", "update", "critic", "reference", "reward", "my own tag"])
def test_any_tag_can_be_asked_for(tag: str) -> None:
    """Tags are arbitrary strings; while no gang needs the node it is lent to rollout."""
    nodes = [node("a", "rollout", tag), node("b", "rollout")]
    assert POLICY.plan(nodes, [], 0.0).assignments["a"] == Assignment(tag="rollout", lent=True)
    plan = POLICY.plan(nodes, [gang("g", 1, tag=tag)], 0.0)
    assert plan.assignments["a"].tag == tag
    assert plan.assignments["b"].tag == "rollout"


def test_nodes_with_the_most_running_turns_continue_generating() -> None:
    """Of equals a gang takes those with the fewest turns (RLHFuse keeps the busiest instances)."""
    nodes = [
        node(name, *BOTH, report=NodeReport(num_turns=turns))
        for name, turns in (("a", 9), ("b", 1), ("c", 5), ("d", 7))
    ]
    assert members(POLICY.plan(nodes, [gang("g", 2)], 0.0), "g") == {"b", "c"}
    better = node("e", *BOTH, train_priority=1.0, report=NodeReport(num_turns=99))
    assert members(POLICY.plan([*nodes, better], [gang("g", 2)], 0.0), "g") == {"e", "b"}


def test_migration_of_the_tail_is_a_gang_of_the_rest() -> None:
    """RLHFuse: when R_t is reached, n - m nodes are asked for; the m busiest keep the tail."""
    busy = {"a": 6, "b": 2, "c": 8, "d": 0}
    nodes = [
        node(name, "rollout", "reward", report=NodeReport(num_turns=turns))
        for name, turns in busy.items()
    ]
    keep = 2
    plan = POLICY.plan(nodes, [gang("scoring", len(nodes) - keep, tag="reward")], 0.0)
    assert members(plan, "scoring") == {"b", "d"}
    assert {name for name, entry in plan.assignments.items() if entry.tag == "rollout"} == {
        "a",
        "c",
    }


def test_gang_takes_nodes_that_have_a_worker_of_its_run() -> None:
    """A worker of another run makes the node that run's too; its own is not written down."""
    nodes = [node("mine", *BOTH), node("both", *BOTH, **shared("train"))]
    plan = POLICY.plan(nodes, [gang("g", 1, run_id=OTHER)], 0.0)
    assert plan.assignments["both"].run_id == OTHER
    assert members(plan, "g") == {"both"}
    plan = POLICY.plan(nodes, [gang("g", 2)], 0.0)
    assert {entry.run_id for entry in plan.assignments.values()} == {""}
    assert members(plan, "g") == {"mine", "both"}
    only = [node("theirs", *BOTH, workers=(Worker(tag="train", address="x", run_id=OTHER),))]
    assert POLICY.plan(only, [gang("g", 1)], 0.0).unplaced == ((RUN, "g"),)


def test_a_gang_gets_the_nodes_that_its_ranks_run_on() -> None:
    """Better ones do not help it; where one of its own is missing, it waits and says so."""
    nodes = [node(name, *BOTH, train_priority=float(name == "c")) for name in "abc"]
    bound = gang("g", 2, node_ids=("a", "b"))
    assert members(POLICY.plan(nodes, [bound], 0.0), "g") == {"a", "b"}
    assert members(POLICY.plan(nodes, [gang("g", 2)], 0.0), "g") == {"c", "a"}
    plan = POLICY.plan(nodes[1:], [bound], 0.0)
    assert members(plan, "g") == set()
    assert plan.waiting[bound.key] == (
        "nodes: 1 of a, b, where its ranks run, can do train for run run, requested 2"
    )


def test_a_gang_whose_ranks_moved_leaves_its_old_nodes() -> None:
    """It has as many as before, but not the right ones."""
    nodes = [node("a", *BOTH, **held("g", size=2)), node("b", *BOTH, **held("g", size=2))]
    moved = gang("g", 2, node_ids=("b", "c"))
    assert members(POLICY.plan([*nodes, node("c", *BOTH)], [moved], 0.0), "g") == {"b", "c"}


def test_gangs_of_the_same_name_are_of_their_runs() -> None:
    """Two runs may call their gangs alike."""
    nodes = [node(name, *BOTH, **shared("train")) for name in "ab"]
    plan = POLICY.plan(nodes, [gang("g", 1), gang("g", 1, 2, run_id=OTHER)], 0.0)
    assert {entry.run_id for entry in plan.assignments.values()} == {"", OTHER}


def test_higher_priority_preempts_and_breaks_no_more_gangs_than_it_must() -> None:
    """It takes free nodes first; a gang that lost one node holds none, and may find others."""
    nodes = [
        node("a", *BOTH, **shared("train"), **held("low", size=2)),
        node("b", *BOTH, **shared("train"), **held("low", size=2)),
        node("c", *BOTH, **shared("train")),
        node("d", *BOTH, **shared("train")),
    ]
    runs = {OTHER: RunPolicy(priority=1)}
    gangs = [gang("low", 2), gang("high", 2, 2, run_id=OTHER)]
    plan = POLICY.plan(nodes, gangs, 0.0, runs)
    assert members(plan, "high") == {"c", "d"}
    assert members(plan, "low") == {"a", "b"}
    gangs[1] = gang("high", 3, 2, run_id=OTHER)
    plan = POLICY.plan(nodes, gangs, 0.0, runs)
    assert members(plan, "high") == {"c", "d", "a"}
    assert members(plan, "low") == set()
    assert POLICY.plan(nodes, gangs, 0.0).unplaced == ((OTHER, "high"),), "equals do not preempt"


def test_a_gang_that_trains_takes_the_node_of_one_that_scores() -> None:
    """It keeps it, whoever came first; a higher priority of the other's run is stronger."""
    scoring = gang("scoring", 1, arrival=1, tag="score", run_id=OTHER)
    training = gang("training", 1, arrival=2)
    both = Worker(tag="score", address="a:1", run_id=OTHER), Worker(tag="train", address="a:2")
    nodes = [node("a", "rollout", "train", "score", workers=both)]
    for gangs, runs, tag in (
        ([scoring], {}, "score"),
        ([scoring, training], {}, "train"),
        ([scoring, training], {OTHER: RunPolicy(priority=1)}, "score"),
    ):
        plan = POLICY.plan(nodes, gangs, 0.0, runs)
        assert plan.assignments["a"].tag == tag
        nodes = [replace(nodes[0], assignment=replace(plan.assignments["a"], epoch=1))]


def test_a_high_gang_that_must_wait_stops_no_running_one() -> None:
    """What it reserves is not given away anew, but who has it keeps it."""
    nodes = [
        node("a", *BOTH, **shared("train"), **held("first", OTHER)),
        node("b", *BOTH, **shared("train"), **held("low")),
    ]
    gangs = [
        gang("low", 1, 1),
        gang("first", 1, 2, run_id=OTHER),
        gang("big", 2, 3, run_id=OTHER),
        gang("late", 1, 4),
    ]
    plan = POLICY.plan(nodes, gangs, 0.0, {OTHER: RunPolicy(priority=1)})
    assert members(plan, "low") == {"b"}
    assert plan.unplaced == ((OTHER, "big"), (RUN, "late"))


def test_quota_limits_gangs_and_rollout_together() -> None:
    """A gang beyond the quota is not placed, with the reason."""
    nodes = [node(name, *BOTH) for name in "abcd"]
    runs = {RUN: RunPolicy(max_nodes=3)}
    plan = POLICY.plan(nodes, [gang("g", 2)], 0.0, runs)
    assert sorted(entry.tag for entry in plan.assignments.values()) == [
        "",
        "rollout",
        "train",
        "train",
    ]
    plan = POLICY.plan(nodes, [gang("g", 4)], 0.0, runs)
    assert plan.waiting == {(RUN, "g"): "quota: run run may have 3 nodes, requested 4"}
    plan = POLICY.plan(nodes, [gang("g", 2), gang("h", 2, 2), gang("late", 1, 3)], 0.0, runs)
    assert members(plan, "g")
    assert plan.waiting == {
        (RUN, "h"): "quota: run run may have 3 nodes",
        (RUN, "late"): "quota: run run may have 3 nodes",
    }, "a later gang that would fit starves nobody"


def test_waiting_gangs_have_a_reason() -> None:
    """Too few nodes at all, others in the way, or too early."""
    nodes = [node("a", *BOTH, **held("g")), node("b", *BOTH)]
    gangs = [gang("g", 1), gang("large", 3, 2), gang("next", 2, 3)]
    gangs.append(gang("later", 1, 4, needed_time=9.0))
    plan = POLICY.plan(nodes, gangs, 0.0)
    assert plan.waiting == {
        (RUN, "large"): "nodes: 2 can do train for run run, requested 3",
        (RUN, "next"): "nodes: other gangs hold or wait for them",
        (RUN, "later"): "time: not needed yet",
    }
