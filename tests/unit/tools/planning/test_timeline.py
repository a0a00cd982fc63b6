"""What an iteration takes on given nodes, against closed forms."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from typing import Any

import pytest

from tests.unit.tools.planning.roles import role
from tools.planning.dataflow import Dataflow, Kind
from tools.planning.timeline import Timeline

ROLLOUT, TRAIN, SCORE = range(3)


def sync(**fields: Any) -> Dataflow:
    """Rollout, then training on what it gave; 80 node-seconds each."""
    return Dataflow(
        roles=(
            role("rollout", 80.0, elastic=True, **fields),
            role("train", 80.0, after=("rollout",), **fields),
        )
    )


def lagging(**fields: Any) -> Dataflow:
    """Training takes the batch of the iteration before."""
    return Dataflow(
        roles=(role("rollout", 80.0, elastic=True, **fields), role("train", 80.0, **fields))
    )


def seconds(dataflow: Dataflow, *groups: tuple[Kind, int]) -> float:
    """The makespan."""
    return Timeline(dataflow, groups).seconds


def test_colocated_is_one_role_after_the_other_with_a_switch_before_each() -> None:
    """Every node does both."""
    assert seconds(sync(), ((ROLLOUT, TRAIN), 8)) == 10 + 10
    assert seconds(sync(switch_seconds=3.0), ((ROLLOUT, TRAIN), 8)) == 3 + 10 + 3 + 10


def test_disaggregated_leaves_each_half_idle_in_turn() -> None:
    """No switch where a node does one thing only."""
    groups = (((ROLLOUT,), 4), ((TRAIN,), 4))
    assert seconds(sync(switch_seconds=3.0), *groups) == 20 + 20


def test_one_iteration_behind_both_halves_run_concurrently() -> None:
    """The makespan is then the period: that of the slower half."""
    groups = (((ROLLOUT,), 5), ((TRAIN,), 3))
    assert seconds(lagging(), *groups) == pytest.approx(80 / 3)


def test_multiplexed_nodes_train_first_and_roll_out_for_the_rest() -> None:
    """SeamlessFlow's pipeline: rollout-only nodes never stop, the others come back to help."""
    groups = (((ROLLOUT,), 4), ((ROLLOUT, TRAIN), 4))
    rest = 80.0 - 20 * 4
    assert seconds(lagging(), *groups) == 20 + rest / 8
    groups = (((ROLLOUT,), 2), ((ROLLOUT, TRAIN), 6))
    trained, switched = 2 + 80 / 6, 2.0
    rest = 80.0 - 2 * (trained + switched)
    assert seconds(lagging(switch_seconds=2.0), *groups) == pytest.approx(
        trained + switched + rest / 8
    )


def streaming(tag_elastic: bool) -> Dataflow:
    """Scoring takes samples as they come, training waits for both."""
    return Dataflow(
        roles=(
            role("rollout", 80.0, elastic=tag_elastic),
            role("train", 80.0, after=("rollout", "score")),
            role("score", 8.0, streams_from=("rollout",)),
        )
    )


@pytest.mark.parametrize("elastic", [False, True])
def test_a_stream_on_separate_nodes_ends_with_its_source(elastic: bool) -> None:
    """RLHFuse's inter-stage fusion: scoring hides behind generation."""
    groups = (((ROLLOUT, TRAIN), 8), ((SCORE,), 1))
    timeline = Timeline(streaming(elastic), groups)
    assert (timeline.begins[SCORE], timeline.ends[SCORE]) == (0, 10)
    assert timeline.seconds == 10 + 10


@pytest.mark.parametrize("elastic", [False, True])
def test_a_stream_never_takes_nodes_from_its_source(elastic: bool) -> None:
    """It would wait for an end that it prevents."""
    assert seconds(streaming(elastic), ((ROLLOUT, TRAIN, SCORE), 8)) == 10 + 1 + 10


def test_a_stream_of_a_stream_never_takes_nodes_from_the_first_source() -> None:
    """The wait would go round a corner."""
    flow = Dataflow(
        roles=(
            role("rollout", 80.0, elastic=True),
            role("critic", 80.0, streams_from=("score",)),
            role("score", 8.0, streams_from=("rollout",)),
        )
    )
    assert seconds(flow, ((0, 1), 8), ((2,), 1)) == 10 + 10


def test_gangs_on_the_same_nodes_take_turns_longest_chain_first() -> None:
    """Nothing orders them but what waits for them."""
    flow = Dataflow(
        roles=(
            role("reference", 8.0),
            role("critic", 8.0),
            role("train", 80.0, after=("critic",)),
        )
    )
    timeline = Timeline(flow, (((0, 1), 8), ((2,), 8)))
    assert (timeline.begins[1], timeline.begins[0]) == (0, 1)
    assert timeline.seconds == 1 + 10


def test_a_role_without_enough_nodes_never_ends() -> None:
    """Infinite, so no search takes it."""
    flow = Dataflow(roles=(role("rollout", 80.0, elastic=True), role("train", 80.0, fewest=4)))
    assert math.isinf(seconds(flow, ((ROLLOUT,), 8)))
    assert math.isinf(seconds(flow, ((ROLLOUT,), 5), ((TRAIN,), 3)))
    assert seconds(flow, ((ROLLOUT,), 4), ((TRAIN,), 4)) == 20


def random_flow(draw: random.Random, **fields: Any) -> Dataflow:
    """Up to four roles in any order."""
    tags = [str(number) for number in range(draw.randint(1, 4))]
    return Dataflow(
        roles=tuple(
            role(
                tag,
                # Divisible by any number of nodes up to 6.
                60.0 * draw.randint(1, 4),
                switch_seconds=float(draw.randint(0, 3)),
                after=tuple(tag for tag in tags[:number] if draw.random() < 0.3),
                streams_from=tuple(tag for tag in tags[:number] if draw.random() < 0.3),
                **fields,
            )
            for number, tag in enumerate(tags)
        )
    )


def random_nodes(draw: random.Random, size: int) -> list[Kind]:
    """What each of up to six nodes carries; every role is somewhere."""
    every = [k for n in range(1, size + 1) for k in itertools.combinations(range(size), n)]
    nodes = [draw.choice(every) for _ in range(draw.randint(1, 6))]
    missing = set(range(size)).difference(*nodes)
    return nodes if not missing else [tuple(sorted({*kind, *missing})) for kind in nodes]


class Ticks:
    """Gangs node by node and second by second: the oracle."""

    def __init__(self, flow: Dataflow, nodes: list[Kind]) -> None:
        self.flow, self.nodes, self.now = flow, nodes, 0
        self.team = {r: [n for n, k in enumerate(nodes) if r in k] for r in range(len(flow.roles))}
        self.alone = [flow.roles[r].profile.seconds(len(self.team[r])) for r in self.team]
        self.begun: dict[int, int] = {}
        self.ended: set[int] = set()

    def may_begin(self, role_: int) -> bool:
        """Whether its inputs are there and its nodes are free."""
        running = self.begun.keys() - self.ended
        sources = set(self.flow.streams_from[role_]) - self.ended
        held = {node for other in running | sources for node in self.team[other]}
        ready = set(self.flow.after[role_]) <= self.ended and sources <= self.begun.keys()
        return role_ not in self.begun and ready and not held & set(self.team[role_])

    def finish(self) -> int:
        """Seconds until all have ended."""
        tails = self.flow.tails(self.alone)
        urgent = sorted(self.team, key=lambda role_: (-tails[role_], role_))
        while len(self.ended) < len(self.team):
            while startable := [role_ for role_ in urgent if self.may_begin(role_)]:
                self.begun[startable[0]] = self.now
            self.now += 1
            for role_ in self.flow.order:
                shared = any(len(self.nodes[node]) > 1 for node in self.team[role_])
                needed = self.alone[role_] + shared * self.flow.roles[role_].switch_seconds
                done = role_ in self.begun and self.now >= self.begun[role_] + needed
                if done and set(self.flow.streams_from[role_]) <= self.ended:
                    self.ended.add(role_)
        return self.now


def test_gangs_end_when_a_simulation_of_every_second_does() -> None:
    """Any order, any sharing of nodes."""
    draw = random.Random(10)
    for _ in range(500):
        flow = random_flow(draw)
        nodes = random_nodes(draw, len(flow.roles))
        groups = list(Counter(nodes).items())
        assert Timeline(flow, groups).seconds == pytest.approx(Ticks(flow, nodes).finish())


def test_no_timeline_beats_its_critical_path_nor_all_roles_in_a_row() -> None:
    """With elastic roles too."""
    draw = random.Random(8)
    for _ in range(500):
        flow = random_flow(draw, elastic=draw.random() < 0.7)
        nodes = random_nodes(draw, len(flow.roles))
        size = len(flow.roles)
        alone = [
            flow.roles[r].profile.seconds(sum(r in kind for kind in nodes)) for r in range(size)
        ]
        found = Timeline(flow, list(Counter(nodes).items())).seconds
        assert found >= flow.critical_path(alone) - 1e-9
        slowest = [flow.roles[r].profile.seconds(1) for r in range(size)]
        # A role is interrupted at most once by each other one, and switched to after each.
        assert found <= sum(slowest) + 3 * size * size
