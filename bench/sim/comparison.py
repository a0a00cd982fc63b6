"""Every mode on every workload, each with the best split of the same nodes.

A mode gets the split with the greatest throughput; multiplexed, whose promise is that no node sits
idle, the greatest among those that keep it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from bench.sim.modes import MODES, Mode, Split
from bench.sim.simulator.simulation import Result, Setting, simulate
from bench.sim.workloads import Workload

_SEARCH_STEPS = 6
"""Steps of a run that only serves to choose a split."""
_GATE_STEPS = 12
"""Steps in which the gate of lending learns what pays."""
_IDLE = 0.02
"""Idle share that multiplexed may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One mode on one workload."""

    setting: Setting
    """With the split that was chosen."""
    result: Result

    @property
    def useful_share(self) -> float:
        """Trained work in all node-seconds."""
        return self.result.node_seconds.useful_share

    @property
    def idle_share(self) -> float:
        """Idle in all node-seconds."""
        return self.result.node_seconds.idle_share


def compare(setting: Setting, nodes: int, told: Callable[[], None]) -> dict[str, Row]:
    """All modes on the workload of `setting`; `told` is called after each."""
    rows = {}
    for mode in MODES.values():
        rows[mode.name] = best(replace(setting, mode=mode), nodes)
        told()
    return rows


def best(setting: Setting, nodes: int) -> Row:
    """The best split, found by climbing: one more, or one fewer trainer."""
    tried: dict[Split, tuple[bool, float]] = {}

    def worth(split: Split) -> tuple[bool, float]:
        if split not in tried:
            short = replace(setting, split=split, steps=min(setting.steps, _SEARCH_STEPS))
            row = Row(setting=short, result=simulate(short))
            busy = setting.mode.kind != "multiplexed" or row.idle_share <= _IDLE
            tried[split] = (busy, row.result.rollouts_per_second)
        return tried[split]

    choices = splits(setting.mode, nodes)
    at = len(choices) // 3
    while True:
        around = range(max(at - 1, 0), min(at + 2, len(choices)))
        best_at = max(around, key=lambda index: worth(choices[index]))
        if best_at == at:
            break
        at = best_at
    chosen = replace(setting, split=choices[at])
    return Row(setting=chosen, result=simulate(chosen))


def splits(mode: Mode, nodes: int) -> list[Split]:
    """What a mode can do with so many nodes, from the smallest training gang up."""
    gangs = range(1, nodes)
    match mode.kind:
        case "colocated":
            return [Split(rollout=0, train=0, both=nodes)]
        case "disaggregated":
            return [Split(rollout=nodes - gang, train=gang, both=0) for gang in gangs]
        case "multiplexed":
            return [Split(rollout=nodes - gang, train=0, both=gang) for gang in gangs]


def lending_gain(setting: Setting, rollout: int, train: int) -> tuple[Result, Result]:
    """The same run with fixed roles, and with the training nodes lent while they wait.

    It begins to count once the gate has measured both ways.
    """
    setting = replace(setting, warm_up=_GATE_STEPS)
    fixed = Split(rollout=rollout, train=train, both=0)
    lent = Split(rollout=rollout, train=0, both=train)
    first, second = (simulate(replace(setting, split=split)) for split in (fixed, lent))
    return first, second


def staleness_curve(setting: Setting, bounds: Iterable[int]) -> Mapping[int, Result]:
    """The same run under other bounds on staleness."""
    return {bound: simulate(replace(setting, max_staleness=bound)) for bound in bounds}


def dispatch(workload: Workload) -> str:
    """Agents that come back with longer prompts want the server that has them cached."""
    return "cache_first" if workload.most_turns > 1 else "least_load"
