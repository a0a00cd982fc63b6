"""Seconds of a stage by number of nodes."""

from __future__ import annotations

import math

import pytest

from scheduler.policy.node_split import StageProfile


def test_a_stage_of_a_shared_and_a_fixed_part_is_met_exactly() -> None:
    """Two points of a + b / n are enough to know it between them."""
    profile = StageProfile.of({4: 10 + 80 / 4, 32: 10 + 80 / 32})
    for nodes in range(4, 33):
        assert profile.seconds(nodes) == pytest.approx(10 + 80 / nodes, rel=1e-12)


def test_measured_points_are_exact_and_nothing_is_slower_than_fewer_nodes() -> None:
    """Interpolation must not invent a reason to take more nodes, nor lose a measurement."""
    table = {2: 97.3, 3: 70.1, 8: 30.7, 20: 30.7, 64: 11.9}
    profile = StageProfile.of(table)
    assert {nodes: profile.seconds(nodes) for nodes in table} == table
    seconds = [profile.seconds(nodes) for nodes in range(1, 80)]
    assert seconds == sorted(seconds, reverse=True)


def test_unmeasured_numbers_of_nodes_are_not_extrapolated() -> None:
    """Fewer nodes than measured cannot do it; more bring nothing."""
    profile = StageProfile.of({8: 20.0, 16: 12.0})
    assert profile.seconds(7) == math.inf
    assert profile.seconds(1000) == 12.0


@pytest.mark.parametrize(
    ("table", "error_text"),
    [
        ({}, "at least one point"),
        ({0: 1.0}, "0 nodes after 0: give positive counts"),
        ({1: 0.0}, r"1 nodes take 0.0 s: give a positive"),
        ({1: math.nan}, "finite"),
        ({1: math.inf}, "finite"),
        ({1: 1.0, 2: 1.5}, "2 nodes take 1.5 s and 1 take 1.0 s: more nodes must not be slower"),
    ],
)
def test_an_invalid_table_is_rejected(table: dict[int, float], error_text: str) -> None:
    """The message names the error and the cure."""
    with pytest.raises(ValueError, match=error_text):
        StageProfile.of(table)
