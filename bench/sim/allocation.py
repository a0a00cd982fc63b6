"""`make bench-allocation`: nodes that move next to every fixed split, as lengths double.

Lengths double in the middle of a run in virtual time, for each seed with every split that is fixed
and with nodes that the scheduler moves. The scheduler's own transactions and policy decide; tokens,
engines and training are simulated (`bench/sim/simulator/simulation.py`). Prompts are longer than
most answers: when answers double, generation has twice the work, training less than twice, and
another split is the best.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from bench.report import Report
from bench.sim.costs import load_costs
from bench.sim.modes import MODES, Split
from bench.sim.simulator.simulation import Result, Setting, simulate
from bench.sim.workloads import RolloutPlan, Workload, load_workloads
from scheduler.policy.training_nodes import SplitRule

_MOVING = 0
"""Number of training nodes that stands for those that move."""
NODES = 8
_NUM_BEFORE, _NUM_AFTER = 24, 30
"""Batches with the first lengths, and with the doubled ones."""
_COUNTED_BEFORE, _COUNTED_AFTER = 12, 16
"""The last steps of each that count: before them batches of other lengths, or moves, are on."""
_PROMPT_TOKENS, _GROUPS = 2560, 32
_FIRST = 5
"""Nodes of the trainer at first, if they move."""


def main() -> None:
    """Simulate and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds: list[int] = parser.parse_args().seeds
    raw: dict[str, Sequence[float]] = {}
    figures: list[Mapping[str, float]] = []
    for seed in seeds:
        found, moves = _runs(seed)
        figures.append(compared(found, moves))
        raw |= {f"{seed}.{name}": values for name, values in _raw(found)}
    worst = {
        name: (max if name == "moves" else min)(each[name] for each in figures)
        for name in figures[0]
    }
    Report(
        bench="allocation",
        figures=worst,
        raw=raw,
        seeds=seeds,
        packages=("seamflow",),
    ).publish()


def compared(found: Mapping[int, Rates], moves: int) -> dict[str, float]:
    """Throughput with moving nodes over the best fixed split's, which is another in each phase.

    Args:
        found: by nodes of the fixed split that train; `_MOVING`: they move.
        moves: of nodes.
    """
    fixed_rates = [each for number, each in found.items() if number != _MOVING]
    figures = {"moves": float(moves)}
    for phase in ("before", "after", "whole"):
        best = max(getattr(each, phase) for each in fixed_rates)
        worst = min(getattr(each, phase) for each in fixed_rates)
        figures[f"{phase}_vs_best_fixed"] = getattr(found[_MOVING], phase) / best
        figures[f"{phase}_vs_worst_fixed"] = getattr(found[_MOVING], phase) / worst
    return figures


def _runs(seed: int) -> tuple[dict[int, Rates], int]:
    setting = drifting_setting(seed)
    size = setting.workload.rollouts_per_step
    found: dict[int, Rates] = {}
    for number in range(1, NODES):
        found[number] = rates(fixed(setting, number).step_ends, size)
        _tell(seed, f"{number} train", found[number])
    result: Result = moving(setting)
    found[_MOVING] = rates(result.step_ends, size)
    _tell(seed, "moving", found[_MOVING], *result.moves)
    return found, len(result.moves)


def _tell(seed: int, name: str, found: Rates, *moves: str) -> None:
    line = ", ".join(f"{phase} {rate:.2f}/s" for phase, rate in asdict(found).items())
    print(f"seed {seed}, {name}: {line}", *moves, sep="\n  ", file=sys.stderr)


def _raw(found: Mapping[int, Rates]) -> Iterator[tuple[str, list[float]]]:
    for number, each in found.items():
        name = "moving" if number == _MOVING else f"train_{number}"
        yield name, [each.before, each.after, each.whole]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drifting(Workload):
    """A workload whose lengths change once."""

    after: Workload
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
    after = replace(first.scaled(2.0), name=first.name)
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


if __name__ == "__main__":
    main()
