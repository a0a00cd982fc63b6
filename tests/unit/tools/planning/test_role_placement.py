"""The search for a placement, against trying every one."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from typing import Any

import pytest

from scheduler.model.stage_profile import StageProfile
from tests.unit.tools.planning.roles import role
from tools.planning.dataflow import Dataflow, Kind, Role
from tools.planning.role_placement import Placement, place
from tools.planning.timeline import Timeline

INSTANCES = 120


def random_flow(draw: random.Random) -> Dataflow:
    """Two or three roles with any costs, memory and order."""
    tags = ["rollout", "reward", "train"][: draw.randint(2, 3)]
    roles = []
    for number, tag in enumerate(tags):
        fixed, shared = draw.choice([0.0, 2.0]), draw.uniform(2, 40)
        fewest = draw.choice([1, 1, 1, 2])
        before = tags[:number]
        roles.append(
            Role(
                tag=tag,
                profile=StageProfile.of({n: fixed + shared / n for n in range(fewest, 5)}),
                active_bytes=draw.randint(1, 8),
                parked_bytes=draw.randint(0, 3),
                switch_seconds=draw.choice([0.0, 1.0, 4.0]),
                shares_nodes=draw.random() < 0.85,
                elastic=draw.random() < 0.4,
                after=tuple(other for other in before if draw.random() < 0.3),
                streams_from=tuple(other for other in before if draw.random() < 0.3),
            )
        )
    return Dataflow(roles=tuple(roles))


def fits(roles: list[Role], device_bytes: int) -> bool:
    """Whether one node can carry them: each in turn active, the others parked."""
    for acting in roles:
        used = sum(r.active_bytes if r is acting else r.parked_bytes for r in roles)
        if used > device_bytes or (len(roles) > 1 and not acting.shares_nodes):
            return False
    return True


def brute_force(flow: Dataflow, num_nodes: int, device_bytes: int) -> float:
    """The least makespan of every way of giving every node any set of roles."""
    size = range(len(flow.roles))
    subsets = [k for n in range(len(flow.roles) + 1) for k in itertools.combinations(size, n)]
    kinds = [kind for kind in subsets if fits([flow.roles[r] for r in kind], device_bytes)]
    seen: dict[tuple[tuple[Kind, int], ...], float] = {}
    for nodes in itertools.product(kinds, repeat=num_nodes):
        groups = tuple(sorted(Counter(kind for kind in nodes if kind).items()))
        if groups not in seen:
            seen[groups] = Timeline(flow, groups).seconds
    return min(seen.values())


def test_the_search_finds_the_brute_force_optimum() -> None:
    """With and without enumeration: exact, and how often the descent alone gets there."""
    draw = random.Random(9)
    descents = feasible = 0
    for _ in range(INSTANCES):
        flow, num_nodes, device_bytes = random_flow(draw), draw.randint(2, 4), 10
        best = brute_force(flow, num_nodes, device_bytes)
        if math.isinf(best):
            with pytest.raises(ValueError, match="found no placement"):
                place(flow, num_nodes, device_bytes)
            continue
        feasible += 1
        found = place(flow, num_nodes, device_bytes)
        assert found.seconds == pytest.approx(best, abs=1e-8)
        check(found, flow, num_nodes, device_bytes)
        descents += seconds_by_descent(flow, num_nodes, device_bytes) <= best + 1e-8
    assert feasible > 0.8 * INSTANCES
    assert descents >= 0.95 * feasible


def seconds_by_descent(flow: Dataflow, num_nodes: int, device_bytes: int) -> float:
    """What the local search alone gives."""
    try:
        return place(flow, num_nodes, device_bytes, max_enumerated=0).seconds
    except ValueError:
        return math.inf


def check(found: Placement, flow: Dataflow, num_nodes: int, device_bytes: int) -> None:
    """Every role is on enough nodes, no node carries too much, and the spans fill the makespan."""
    assert len(found.tags) == num_nodes
    for one in flow.roles:
        assert sum(one.tag in tags for tags in found.tags) >= one.profile.nodes[0]
    for tags in found.tags:
        assert fits([one for one in flow.roles if one.tag in tags], device_bytes)
    assert {tag for tag, _, _ in found.spans} == {one.tag for one in flow.roles}
    assert max(end for _, _, end in found.spans) == pytest.approx(found.seconds)


def two_roles(*, behind: bool, switch: float, **fields: Any) -> Dataflow:
    """Rollout and training, 80 node-seconds each."""
    return Dataflow(
        roles=(
            role("rollout", 80.0, elastic=True, switch_seconds=switch, **fields),
            role("train", 80.0, after=() if behind else ("rollout",), switch_seconds=switch),
        )
    )


def test_colocated_comes_out_where_training_waits_for_rollout() -> None:
    """Half of the nodes would idle at any time otherwise."""
    found = place(two_roles(behind=False, switch=1.0), 8, 1)
    assert set(found.tags) == {("rollout", "train")}
    assert found.seconds == pytest.approx(22.0)


def test_disaggregated_comes_out_where_switches_are_dear_and_staleness_allowed() -> None:
    """Equal halves that never stop."""
    found = place(two_roles(behind=True, switch=5.0), 8, 1)
    assert Counter(found.tags) == {("train",): 4, ("rollout",): 4}
    assert found.seconds == pytest.approx(20.0)


def test_disaggregated_comes_out_where_memory_holds_one_role_only() -> None:
    """Even if training waits for rollout."""
    flow = two_roles(behind=False, switch=0.0, active_bytes=8, parked_bytes=8)
    assert Counter(place(flow, 8, 8).tags) == {("rollout", "train"): 8}
    train = role("train", 80.0, after=("rollout",), active_bytes=1)
    flow = Dataflow(roles=(flow.roles[0], train))
    assert Counter(place(flow, 8, 8).tags) == {("train",): 4, ("rollout",): 4}


def test_multiplexed_comes_out_where_stages_do_not_divide_the_nodes() -> None:
    """Some nodes train for a while and then roll out with the others."""
    roles = (
        role("rollout", 300.0, elastic=True, switch_seconds=1.0),
        Role(tag="train", profile=StageProfile.of({4: 10.0}), switch_seconds=1.0),
    )
    found = place(Dataflow(roles=roles), 8, 1)
    assert Counter(found.tags) == {("rollout", "train"): 4, ("rollout",): 4}
    # Four nodes train for 11 s and switch back for 1 s; the rest of the work has all eight.
    assert found.seconds == pytest.approx(12 + (300 - 12 * 4) / 8)
    assert found.tags[:4] == (("rollout", "train"),) * 4


def test_equally_fast_placements_cost_the_fewest_tags_and_nodes() -> None:
    """Nodes that would bring nothing stay free."""
    flow = Dataflow(roles=(Role(tag="reward", profile=StageProfile.of({1: 5.0, 2: 5.0})),))
    assert place(flow, 4, 1).tags == (("reward",), (), (), ())


def test_many_nodes_are_placed_by_descent() -> None:
    """256 nodes and the five roles of PPO: no worse than what a person would begin with."""
    roles = (
        role("rollout", 12_000.0, fewest=4, elastic=True, switch_seconds=6.0, active_bytes=60),
        role("reference", 900.0, streams_from=("rollout",), switch_seconds=2.0, active_bytes=30),
        role("reward", 900.0, streams_from=("rollout",), switch_seconds=2.0, active_bytes=30),
        role(
            "critic",
            3_000.0,
            fewest=4,
            after=("reference", "reward"),
            switch_seconds=4.0,
            active_bytes=70,
        ),
        role(
            "train",
            6_000.0,
            fewest=8,
            after=("reference", "reward"),
            switch_seconds=4.0,
            active_bytes=75,
        ),
    )
    flow = Dataflow(roles=roles)
    found = place(flow, 256, 80)
    check(found, flow, 256, 80)
    colocated = Timeline(flow, [((0, 1, 2, 3, 4), 256)]).seconds
    even = Timeline(flow, [((index,), 51) for index in range(5)]).seconds
    assert found.seconds < 0.95 * min(colocated, even)
    assert found == place(flow, 256, 80)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ((), "at least one role"),
        ((role("a", 1.0), role("a", 1.0)), "each tag once"),
        ((role("a", 1.0, after=("b",)),), "after of a names 'b': use one of"),
        ((role("a", 1.0, after=("b",)), role("b", 1.0, streams_from=("a",))), "wait for each"),
    ],
)
def test_an_invalid_order_is_rejected(roles: tuple[Role, ...], message: str) -> None:
    """The message names the role."""
    with pytest.raises(ValueError, match=message):
        Dataflow(roles=roles)


def test_an_invalid_role_is_rejected() -> None:
    """No name, a negative cost."""
    with pytest.raises(ValueError, match="name the role"):
        role("", 1.0)
    with pytest.raises(ValueError, match=r"switch_seconds of a is -1\.0"):
        role("a", 1.0, switch_seconds=-1.0)


def test_a_role_too_large_for_any_node_is_rejected() -> None:
    """And so is a pool without nodes."""
    flow = Dataflow(roles=(role("train", 1.0, active_bytes=90),))
    with pytest.raises(ValueError, match="active_bytes of train is 90, a node has 80"):
        place(flow, 4, 80)
    with pytest.raises(ValueError, match="num_nodes is 0"):
        place(flow, 0, 90)
    flow = Dataflow(roles=(role("train", 1.0, fewest=5),))
    with pytest.raises(ValueError, match="num_nodes is 4: train was measured on 5 or more"):
        place(flow, 4, 80)
