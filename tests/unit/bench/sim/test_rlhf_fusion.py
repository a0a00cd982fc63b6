"""RLHF steps with and without fusion: what is compared."""

from __future__ import annotations

import pytest

from bench.sim import rlhf_fusion
from bench.sim.rlhf_fusion import figures, seconds_by_side, work_of_a_token


def test_every_side_has_a_step_in_each_round_and_another_one_is_first() -> None:
    """What the machine does beside them falls on all of them."""
    turns = [side.name for side in rlhf_fusion._turns(rlhf_fusion._SIDES, 4)]
    rounds = [turns[first : first + 4] for first in range(0, 16, 4)]
    assert all(len(set(names)) == 4 for names in rounds)
    assert len({names[0] for names in rounds}) == 4


def test_steps_count_for_their_side_and_the_warm_up_for_none() -> None:
    """A step lasts from the end of the one before to its own."""
    found = seconds_by_side([5.0, 10.0, 30.0, 40.0, 61.0], ["w", "w", "one", "two", "one"])
    assert found == {"one": [20.0, 21.0], "two": [10.0]}


def test_both_bases_are_compared_with() -> None:
    """Ratios of samples per second, so of seconds the other way round."""
    found = figures({"unfused": [20.0], "both": [10.0], "colocated": [15.0]})
    assert found["both_vs_unfused"] == pytest.approx(2.0)
    assert found["both_vs_colocated"] == pytest.approx(1.5)
    assert found["both.samples_per_second"] == pytest.approx(12.8)


def test_fused_pipelines_leave_less_idle_time() -> None:
    """Of the paper's setting: its plan is at the bound of 366 ticks; scoring stays as it is."""
    scoring, least = (1 + 2 / 5 + 2 / 5) / 5.5, 366 / (16 * 5) / 5.5
    assert work_of_a_token(is_fused=True) == pytest.approx(scoring + least)
    assert work_of_a_token(is_fused=False) > work_of_a_token(is_fused=True)
