"""`python -m bench.sim.tail_sweep`: R_t as the scheduler computes it, next to every fixed one.

A run of the real control plane on emulated nodes, one of which only rolls out and two of which
train too. Each step waits for new weights, so its batch has a tail. The steps of a round have the
same rollouts and differ in when the trainer starts: first as the scheduler computes from earlier
rounds, then at fixed numbers of complete groups. After some rounds all lengths double.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rich.console import Console

from bench.report import Report
from bench.sim.costs import load_costs
from bench.sim.emulation.emulated_comparison import MOST_CORES
from bench.sim.emulation.prompts import Emulation
from bench.sim.emulation.rig import emulate
from bench.sim.lending_grid import scaled
from bench.sim.modes import Mode, Split
from bench.sim.simulator.simulation import Setting
from bench.sim.workloads import LogNormal, RolloutPlan, Workload

COMPUTED = 0
"""A start that the scheduler computes; others are numbers of complete groups."""
_DRIFT = 2.0
_WARM_UP = 2
"""Steps before the first round: nothing is measured yet."""
_SPLIT = Split(rollout=1, train=0, both=2)
MODE = Mode(name="inter-stage fusion", kind="multiplexed", admission="published", ahead=0)
"""Each batch waits for the weights of the step before, on nodes that are lent meanwhile."""
_NEVER = LogNormal(median=0.0, sigma=0.0, most=0.0, prompt_share=0.0)
WORKLOAD = Workload(
    name="tail",
    least_turns=1,
    most_turns=1,
    prompt_tokens=256,
    output_tokens=LogNormal(median=1000.0, sigma=0.745, most=10_000.0, prompt_share=0.7),
    tool_tokens=0,
    tool_seconds=_NEVER,
    most_context=10_256,
    group_size=4,
    groups_per_step=32,
    slots=64,
    rollouts_per_node=64,
    max_staleness=0,
)
"""RLHFuse's kind of lengths: one in a thousand is ten times the median."""
_STARTS = (COMPUTED, 2, 8, 14, 20, 26, 30, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated(Workload):
    """A workload whose batches are repeated, and whose lengths change once."""

    before: Workload
    """What agents do at first."""
    after: Workload
    """What they do from `num_before` batches on."""
    num_before: int
    """Batches, the warm-up apart."""
    repeats: int
    """Steps with the same batch."""
    warm_up: int
    """Steps before the first of these, each with a batch of its own."""

    def group(self, seed: int, number: int) -> list[RolloutPlan]:
        """The rollouts of group `number`."""
        step, index = divmod(number, self.groups_per_step)
        batch = (step - self.warm_up) // self.repeats if step >= self.warm_up else -1 - step
        workload = self.before if batch < self.num_before else self.after
        return workload.group(seed, (batch + self.warm_up) * self.groups_per_step + index)


def main() -> None:
    """Run, print and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=2, help="before lengths double, and after")
    parser.add_argument("--speed", type=float, default=8.0, help="emulated seconds in a second")
    given = parser.parse_args()
    setting = _setting(given.seed, given.rounds)
    of_steps = starts(given.rounds)
    emulation = Emulation(speed=given.speed, thinning=16, starts=of_steps)
    emulated = asyncio.run(
        emulate(setting, emulation, batch__start_at_tail=True, batch__micro_batch_tokens=256)
    )
    if emulated.control_plane_cores > MOST_CORES:
        Console().print(f"the control plane took {emulated.control_plane_cores:.2f} cores")
    seconds = step_seconds(emulated.result.step_ends, of_steps, given.rounds)
    computed = [
        found for found, start in zip(emulated.starts, of_steps, strict=False) if start == COMPUTED
    ]
    Report(
        bench="tail",
        figures={
            **figures(seconds),
            "computed_start_least": min(computed),
            "computed_start_most": max(computed),
            "control_plane_cores": emulated.control_plane_cores,
        },
        raw={**seconds, "computed_starts": computed},
        seeds=[given.seed],
        packages=("seamflow",),
    ).publish()


def step_seconds(
    step_ends: Sequence[float], of_steps: Sequence[int], rounds: int
) -> dict[str, list[float]]:
    """Seconds of steps, by "before" or "after" the change of lengths, and by start.

    Args:
        step_ends: seconds at which the steps ended, those of the warm-up first.
        of_steps: start of each.
        rounds: before the change, and after it.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    num_before = _WARM_UP + rounds * len(_STARTS)
    for step, (begin, end) in enumerate(pairwise(step_ends), start=1):
        if step >= _WARM_UP:
            phase = "before" if step < num_before else "after"
            seconds[f"{phase}.{_name(of_steps[step])}"].append(end - begin)
    return dict(seconds)


def figures(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Rollouts per second, and for each phase the computed start's relative to the fixed ones'."""
    rates = {
        name: len(each) * WORKLOAD.rollouts_per_step / sum(each) for name, each in seconds.items()
    }
    found = {}
    for phase in ("before", "after"):
        fixed = {start: rates[f"{phase}.{_name(start)}"] for start in _STARTS if start != COMPUTED}
        computed = rates[f"{phase}.{_name(COMPUTED)}"]
        found[f"{phase}.computed_vs_best_fixed"] = computed / max(fixed.values())
        found[f"{phase}.computed_vs_worst_fixed"] = computed / min(fixed.values())
        found[f"{phase}.computed_vs_whole_batch"] = computed / fixed[max(fixed)]
        found[f"{phase}.best_fixed_start"] = max(fixed, key=fixed.__getitem__)
    return found | {f"{name}.rollouts_per_second": rate for name, rate in rates.items()}


def _name(start: int) -> str:
    return "computed" if start == COMPUTED else f"start_{start}"


def starts(rounds: int) -> tuple[int, ...]:
    """Of every step: the fixed ones in another order in each round, always after the computed."""
    fixed = list(_STARTS[1:])
    turns = [fixed[number:] + fixed[:number] for number in range(2 * rounds)]
    whole = WORKLOAD.groups_per_step
    return (*[whole] * _WARM_UP, *(start for turn in turns for start in (COMPUTED, *turn)))


def _setting(seed: int, rounds: int) -> Setting:
    workload = {name: getattr(WORKLOAD, name) for name in Workload.__dataclass_fields__}
    repeated = Repeated(
        **workload,
        before=WORKLOAD,
        after=replace(scaled(WORKLOAD, _DRIFT), name=WORKLOAD.name),
        num_before=rounds,
        repeats=len(_STARTS),
        warm_up=_WARM_UP,
    )
    setting = Setting(mode=MODE, workload=repeated, split=_SPLIT, costs=load_costs(), seed=seed)
    return replace(setting, warm_up=_WARM_UP, steps=2 * rounds * len(_STARTS), lending="always")


if __name__ == "__main__":
    main()
