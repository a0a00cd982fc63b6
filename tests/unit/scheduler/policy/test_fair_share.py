"""How runs share the nodes that no gang holds."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seamflow.scheduler.v1.scheduler_service_pb2 import NodeReport

from scheduler.model.records import Assignment, Node, RunPolicy, Worker
from scheduler.policy.allocation_policy import divide
from tests.lib.scheduler.support import RUN, node


def shared(name: str, *runs: str, now: str = "", turns: int = 0) -> Node:
    """A rollout node with workers of `runs` that rolls out for the run `now`."""
    return node(
        name,
        "rollout",
        workers=tuple(Worker(tag="rollout", address=run, run_id=run) for run in runs),
        assignment=Assignment(tag="rollout", run_id=now) if now else Assignment(),
        report=NodeReport(num_turns=turns),
    )


def test_newcomers_are_dealt_out_by_share() -> None:
    """Seven nodes between shares 1, 2 and 4."""
    nodes = [shared(f"{index}", "x", "y", "z") for index in range(7)]
    runs = {"y": RunPolicy(rollout_share=2.0), "z": RunPolicy(rollout_share=4.0)}
    assert Counter(divide(nodes, {}, runs).values()) == {"x": 1, "y": 2, "z": 4}


@pytest.mark.parametrize(
    ("counts", "expected"),
    [((3, 2), (3, 2)), ((3, 1), (2, 2)), ((5, 0), (3, 2)), ((2, 3), (2, 3))],
)
def test_nodes_stay_unless_the_division_is_off_by_one(
    counts: tuple[int, int], expected: tuple[int, int]
) -> None:
    """Half a node off changes nothing; a whole one moves."""
    nodes = [
        shared(f"{run}{index}", "x", "y", now=run)
        for run, count in zip("xy", counts, strict=True)
        for index in range(count)
    ]
    after = Counter(divide(nodes, {}, {}).values())
    assert (after["x"], after["y"]) == expected


def test_the_least_busy_node_moves() -> None:
    """Its turns are the fewest to interrupt."""
    nodes = [
        shared(name, "x", "y", now="x", turns=turns)
        for name, turns in (("a", 5), ("b", 1), ("c", 7))
    ]
    assert divide(nodes, {}, {}) == {"a": "x", "b": "y", "c": "x"}


def test_a_node_without_named_workers_rolls_out_for_its_own_run() -> None:
    """Sharing concerns only those that have workers of several runs."""
    nodes = [node("a", "rollout"), shared("b", "x")]
    assert divide(nodes, {}, {"x": RunPolicy(rollout_share=9.0)}) == {"a": RUN, "b": "x"}


def test_quota_counts_what_gangs_hold() -> None:
    """The busiest stay within it; the others go to another run, or stay idle."""
    nodes = [shared(f"{index}", "x", now="x", turns=index) for index in range(3)]
    nodes.append(shared("s", "x", "y", now="x"))
    runs = {"x": RunPolicy(max_nodes=4)}
    assert divide(nodes, {"x": 2}, runs) == {"2": "x", "1": "x", "s": "y"}


RUNS = ("x", "y", "z")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    serving=st.lists(st.sets(st.sampled_from(RUNS), min_size=1), max_size=20),
    shares=st.tuples(*(st.floats(0.1, 10.0) for _ in RUNS)),
    limits=st.tuples(*(st.integers(0, 8) for _ in RUNS)),
)
def test_division_is_stable_within_quota_and_off_by_less_than_one(
    serving: list[set[str]], shares: tuple[float, ...], limits: tuple[int, ...]
) -> None:
    """Random pools: carried out, it stays; any two runs that share a node have their shares."""
    runs = {
        run: RunPolicy(rollout_share=share, max_nodes=limit)
        for run, share, limit in zip(RUNS, shares, limits, strict=True)
    }
    nodes = [shared(f"{index:02}", *sorted(names)) for index, names in enumerate(serving)]
    first = divide(nodes, {}, runs)
    settled = [
        shared(entry.node_id, *entry.runs_for("rollout"), now=first.get(entry.node_id, ""))
        for entry in nodes
    ]
    assert divide(settled, {}, runs) == first
    counts = Counter(first.values())
    for entry in nodes:
        source = first.get(entry.node_id)
        for target in entry.runs_for("rollout"):
            room = not runs[target].max_nodes or counts[target] < runs[target].max_nodes
            assert source is not None or not room
            if source is not None and room and target != source:
                both = runs[source].rollout_share + runs[target].rollout_share
                due = (counts[source] + counts[target]) * runs[source].rollout_share / both
                assert counts[source] - due < 1
