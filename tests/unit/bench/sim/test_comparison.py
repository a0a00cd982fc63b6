"""The choice of a split for each mode, and what lending and its gate are compared with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.sim.comparison import best, splits
from bench.sim.lending_grid import Cell, measure, scaled
from bench.sim.modes import MODES, Split
from bench.sim.scale import setting as scale_setting
from bench.sim.simulator.simulation import simulate
from tests.lib.bench_sim.support import AGENTIC, SINGLE, setting

NODES = 5


@pytest.mark.parametrize("mode", MODES)
def test_the_best_of_all_splits_is_found(mode: str) -> None:
    """By climbing, as well as by trying each."""
    run = replace(setting(mode), steps=2)
    tried = {
        simulate(replace(run, split=split)).rollouts_per_second: split
        for split in splits(run.mode, NODES)
    }
    row = best(run, NODES)
    assert row.result.rollouts_per_second == max(tried)
    assert row.setting.split == tried[max(tried)]
    assert 0 < row.useful_share <= 1 - row.idle_share


def test_splits_are_those_a_mode_can_have() -> None:
    """All nodes are used, and each part has one at least."""
    assert splits(MODES["colocated-sync"], 3) == [Split(rollout=0, train=0, both=3)]
    fixed = splits(MODES["one-step-async"], 3)
    assert fixed == [Split(rollout=2, train=1, both=0), Split(rollout=1, train=2, both=0)]
    lent = splits(MODES["multiplexed"], 3)
    assert lent == [Split(rollout=2, train=0, both=1), Split(rollout=1, train=0, both=2)]


def test_a_cell_of_the_grid_compares_three_ways_of_lending() -> None:
    """Nodes that are too few to generate gain from being lent; the price is what the gate loses."""
    cell = measure(replace(setting(workload=scaled(SINGLE, 4.0)), steps=4), rollout=1, train=3)
    assert set(cell.rates) == {"never", "always", "gated"}
    assert cell.always_gain > 1.1
    known = Cell(
        workload="w", rollout=1, train=3, rates={"never": 2.0, "always": 4.0, "gated": 3.0}
    )
    assert (known.gate_ratio, known.always_gain, known.price) == (1.5, 2.0, 0.25)
    assert known.name == "w.1_3"


def test_scaled_outputs_are_longer_and_nothing_else() -> None:
    """Draws are the same otherwise."""
    longer = scaled(AGENTIC, 2.0)
    assert longer.output_tokens.median == 2 * AGENTIC.output_tokens.median
    assert longer.most_context == 2 * AGENTIC.most_context
    assert scaled(AGENTIC, 0.5).most_context == AGENTIC.most_context


def test_a_large_cluster_trains_on_larger_batches() -> None:
    """In proportion to its nodes, so that a step takes as long."""
    small, large = (scale_setting(nodes, 3600.0, 0) for nodes in (16, 1000))
    assert large.split.nodes == 1000
    assert large.workload.groups_per_step == small.workload.groups_per_step * 1000 // 16
