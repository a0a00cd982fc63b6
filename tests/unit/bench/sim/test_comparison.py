"""The choice of a split for each mode."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.sim.comparison import best, splits
from bench.sim.modes import MODES, Split
from bench.sim.simulator.simulation import simulate
from tests.lib.bench_sim.support import AGENTIC, setting

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


def test_scaled_outputs_are_longer_and_nothing_else() -> None:
    """Draws are the same otherwise."""
    longer = AGENTIC.scaled(2.0)
    assert longer.output_tokens.median == 2 * AGENTIC.output_tokens.median
    assert longer.most_context == 2 * AGENTIC.most_context
    assert AGENTIC.scaled(0.5).most_context == AGENTIC.most_context
