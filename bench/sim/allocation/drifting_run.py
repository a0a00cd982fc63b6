"""A run in virtual time whose lengths double, with splits of its nodes that are fixed or move.

The scheduler's own transactions and policy decide; tokens, engines and training are simulated
(`bench/sim/simulator/simulation.py`). Prompts are longer than most answers: when answers double,
generation has twice the work, training less than twice, and another split is the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.sim.costs import load_costs
from bench.sim.lending_grid import scaled
from bench.sim.modes import MODES, Split
from bench.sim.simulator.simulation import Result, Setting, simulate
from bench.sim.workloads import RolloutPlan, Workload, load_workloads
from scheduler.policy.training_nodes import SplitRule

NODES = 8
_NUM_BEFORE, _NUM_AFTER = 24, 30
"""Batches with the first lengths, and with the doubled ones."""
_COUNTED_BEFORE, _COUNTED_AFTER = 12, 16
"""The last steps of each that count: before them batches of other lengths, or moves, are on."""
_PROMPT_TOKENS, _GROUPS = 2560, 32
_FIRST = 5
"""Nodes of the trainer at first, if they move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drifting(Workload):
    """A workload whose lengths change once."""

    after: Workload
    """What agents do after the change."""
    num_before: int
    """Batches before it."""

    def group(self, seed: int, number: int) -> list[RolloutPlan]:
        """The rollouts of group `number`."""
        if number < self.num_before * self.groups_per_step:
            return Workload.group(self, seed, number)
        return self.after.group(seed, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rollouts per second."""

    before: float
    """In the last steps before lengths double."""
    after: float
    """In the last steps."""
    whole: float
    """From the second step to the last: moves, and what they wait for, included."""


def drifting_setting(seed: int) -> Setting:
    """Of all runs: they differ in the split alone."""
    first = load_workloads()["single_turn_8k"]
    longest = first.most_context + _PROMPT_TOKENS
    first = replace(
        first, groups_per_step=_GROUPS, prompt_tokens=_PROMPT_TOKENS, most_context=longest
    )
    after = replace(scaled(first, 2.0), name=first.name)
    fields = {name: getattr(first, name) for name in Workload.__dataclass_fields__}
    return Setting(
        mode=MODES["multiplexed"],
        workload=Drifting(**fields, after=after, num_before=_NUM_BEFORE),
        split=Split(rollout=1, train=1, both=0),
        costs=load_costs(),
        seed=seed,
        warm_up=2,
        steps=_NUM_BEFORE + _NUM_AFTER - 2,
        lending="never",
    )


def fixed(setting: Setting, num_training: int) -> Result:
    """The run in which `num_training` nodes train and all others generate, from start to end."""
    split = Split(rollout=NODES - num_training, train=num_training, both=0)
    return simulate(replace(setting, split=split))


def moving(setting: Setting) -> Result:
    """The run with nodes that do both, moved by the scheduler's rule as it is by default."""
    rule = SplitRule(max_nodes=NODES - 1)
    split = Split(rollout=0, train=0, both=NODES)
    return simulate(replace(setting, split=split, split_rule=rule, first_gang=_FIRST))


def rates(step_ends: Sequence[float], rollouts_per_step: int) -> Rates:
    """Of a run, from the seconds at which its steps ended."""

    def between(first: int, last: int) -> float:
        return (last - first) * rollouts_per_step / (step_ends[last - 1] - step_ends[first - 1])

    end = _NUM_BEFORE + _NUM_AFTER
    return Rates(
        before=between(_NUM_BEFORE - _COUNTED_BEFORE, _NUM_BEFORE),
        after=between(end - _COUNTED_AFTER, end),
        whole=between(2, end),
    )
