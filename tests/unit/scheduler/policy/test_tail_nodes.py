"""While a gang trains, its run keeps m nodes for the tail and other runs get the rest."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from seamflow.scheduler.v1.scheduler_service_pb2 import NodeReport

from scheduler.model.records import Assignment, Gang, Node, NodeState, RunPolicy, Worker
from scheduler.policy.allocation_policy import Plan, PreemptivePolicy
from tests.lib.scheduler.support import BOTH, RUN, gang, node

OTHER = "other"


def rollout_nodes(*turns: int, runs: tuple[str, ...] = (RUN, OTHER)) -> list[Node]:
    """They roll out for `RUN`, with so many turns each, and could for `runs`."""
    return [
        node(
            f"n{index}",
            "rollout",
            workers=tuple(Worker(tag="rollout", address=f"{run}:1", run_id=run) for run in runs),
            assignment=Assignment(tag="rollout"),
            report=NodeReport(num_turns=number),
            state=NodeState.ACTIVE,
        )
        for index, number in enumerate(turns)
    ]


def planned(nodes: list[Node], training: Gang, **runs: RunPolicy) -> Plan:
    """With a node that the gang gets."""
    return PreemptivePolicy().plan([*nodes, node("train", *BOTH)], [training], 0.0, runs)


def runs_of(plan: Plan) -> dict[str, str]:
    """Node -> run it rolls out for."""
    return {
        name: assignment.run_id or RUN
        for name, assignment in plan.assignments.items()
        if assignment.tag == "rollout"
    }


def test_the_nodes_with_most_turns_keep_the_tail() -> None:
    """The others generate for the other run, whatever its share."""
    nodes = rollout_nodes(3, 9, 1, 5)
    plan = planned(nodes, gang("g", 1, tail_nodes=2), other=RunPolicy(rollout_share=0.01))
    assert runs_of(plan) == {"n1": RUN, "n3": RUN, "n0": OTHER, "n2": OTHER}


@pytest.mark.parametrize("control", ["no tail", "waiting", "nobody else", "quota"])
def test_otherwise_nodes_stay(control: str) -> None:
    """Where nothing is known of a tail, before the gang has nodes, or where none can use them."""
    nodes = rollout_nodes(3, 9, 1, 5, runs=(RUN,) if control == "nobody else" else (RUN, OTHER))
    training, runs = gang("g", 1, tail_nodes=2), {"other": RunPolicy(rollout_share=0.01)}
    if control == "no tail":
        training = replace(training, tail_nodes=0)
    elif control == "waiting":
        training = replace(training, needed_time=10.0)
    elif control == "quota":
        runs = {"other": RunPolicy(rollout_share=0.01, max_nodes=1)}
    counts = Counter(runs_of(planned(nodes, training, **runs)).values())
    left = {"quota": 3, "waiting": 5}.get(control, 4)
    assert counts[RUN] == left, "the node of a gang that waits rolls out too"
    assert counts[OTHER] == (1 if control == "quota" else 0)


def test_a_run_s_own_quota_holds_in_its_tail() -> None:
    """It is the smaller of both."""
    plan = planned(
        rollout_nodes(3, 9, 1, 5), gang("g", 1, tail_nodes=3), run=RunPolicy(max_nodes=2)
    )
    assert Counter(runs_of(plan).values()) == {RUN: 1, OTHER: 3}
