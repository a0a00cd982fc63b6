"""`make bench-rlhf`: RLHF steps of four models, without RLHFuse's two fusions and with them.

Actor, critic, reference and reward model on the real control plane and emulated nodes. Steps are
synchronous: each batch waits for the weights of the step before. One run has two nodes for
inference and training, which generate too, and a third that only generates; its steps take turns:

    unfused        the whole batch is generated, scored and trained; the critic behind the actor
    inter_stage    at R_t, which the scheduler computes, the last rollouts gather on the third node
    intra_stage    actor and critic in one fused pipeline
    both

The paper's own base has no node apart: another run, `colocated`, does everything on all three. The
steps of a round have the same rollouts, so R_t may be computed from their lengths as well.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise

from rich.console import Console

from bench.fusion.settings import SETTINGS
from bench.report import Report
from bench.sim.costs import load_costs
from bench.sim.emulation.emulated_comparison import MOST_CORES
from bench.sim.emulation.prompts import Emulation
from bench.sim.emulation.rig import emulate
from bench.sim.modes import Mode, Split
from bench.sim.simulator.simulation import Setting
from bench.sim.tail_sweep import COMPUTED, MODE, WORKLOAD, Repeated
from trainer.pipeline.fused_schedule.plan import fused_plan, serial_orders
from trainer.pipeline.fused_schedule.timeline import timeline

_WARM_UP = 2
"""Steps before the first round: nothing is measured yet."""
_WHOLE = WORKLOAD.groups_per_step
_MODELS = SETTINGS[4]
"""Actor and critic of 8 stages each, 16 micro-batches; the critic's take two fifths of the time."""
_COST_MODEL_FORWARDS = 11 / 2
"""Forward passes in what costs.toml has a token cost: 11 operations for each parameter, not 2."""
_APART = Split(rollout=1, train=0, both=2)
_COLOCATED = Split(rollout=0, train=0, both=3)


@dataclass(frozen=True, slots=True)
class Side:
    """What a step does."""

    name: str
    start: int
    """Groups that are complete when inference begins; COMPUTED: as the scheduler says."""
    is_fused: bool
    """Actor and critic in one pipeline."""


_UNFUSED = Side("unfused", _WHOLE, is_fused=False)
_SIDES = (
    _UNFUSED,
    Side("inter_stage", COMPUTED, is_fused=False),
    Side("intra_stage", _WHOLE, is_fused=True),
    Side("both", COMPUTED, is_fused=True),
)


def main() -> None:
    """Run, print and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=4, help="of steps of each side")
    parser.add_argument("--speed", type=float, default=6.0, help="emulated seconds in a second")
    given = parser.parse_args()
    apart = _run(given, MODE, _APART, _SIDES, batch__start_at_tail=True)
    together = replace(MODE, name="colocated", kind="colocated")
    base = _run(given, together, _COLOCATED, (replace(_UNFUSED, name="colocated"),))
    seconds = {**apart, **base}
    work = {f"work_{_name(fused)}": work_of_a_token(fused) for fused in (False, True)}
    Report(
        bench="rlhf",
        figures={**figures(seconds), **work},
        raw=seconds,
        seeds=[given.seed],
        packages=("seamflow",),
    ).publish()


def _run(
    given: argparse.Namespace, mode: Mode, split: Split, sides: Sequence[Side], **trainer: object
) -> dict[str, list[float]]:
    """Seconds of the steps of each side."""
    turns = [_UNFUSED] * _WARM_UP + _turns(sides, given.rounds)
    emulation = Emulation(
        speed=given.speed,
        thinning=16,
        starts=tuple(side.start for side in turns),
        work=tuple(work_of_a_token(side.is_fused) for side in turns),
    )
    setting = _setting(given.seed, mode, split, given.rounds, len(sides))
    found = asyncio.run(emulate(setting, emulation, batch__micro_batch_tokens=256, **trainer))
    if found.control_plane_cores > MOST_CORES:
        Console().print(f"the control plane took {found.control_plane_cores:.2f} cores")
    return seconds_by_side(found.result.step_ends, [side.name for side in turns])


def _turns(sides: Sequence[Side], rounds: int) -> list[Side]:
    """Every side once in each round, another one first."""
    order = list(sides)
    return [
        side
        for number in range(rounds)
        for side in islice(cycle(order), number, number + len(order))
    ]


def seconds_by_side(step_ends: Sequence[float], names: Sequence[str]) -> dict[str, list[float]]:
    """Seconds of each side's steps, the warm-up apart.

    Args:
        step_ends: seconds at which the steps ended, those of the warm-up first.
        names: side of each step.
    """
    seconds: dict[str, list[float]] = {}
    steps = list(zip(names[1:], pairwise(step_ends), strict=False))
    for name, (begin, end) in steps[_WARM_UP - 1 :]:
        seconds.setdefault(name, []).append(end - begin)
    return seconds


def figures(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Samples per second of each side, and in those of the two without a fusion."""
    rates = {
        name: len(each) * WORKLOAD.rollouts_per_step / sum(each) for name, each in seconds.items()
    }
    bases = ("unfused", "colocated")
    found = {
        f"{name}_vs_{base}": rate / rates[base]
        for base in bases
        for name, rate in rates.items()
        if name not in bases
    }
    return found | {f"{name}.samples_per_second": rate for name, rate in rates.items()}


def work_of_a_token(is_fused: bool) -> float:
    """Scoring and training of a token, in what a token costs by the cost model.

    Scoring is a forward pass of reference, reward model and critic, training the time of the two
    pipelines as they are planned, idle times included.
    """
    problem = _MODELS.problem()
    ticks = (
        fused_plan(problem).seconds
        if is_fused
        else timeline(problem, serial_orders(problem)).seconds
    )
    critic = _MODELS.critic_forward / _MODELS.actor_forward
    training = ticks / (_MODELS.micro_batches * _MODELS.actor_forward)
    return (1 + critic + critic + training) / _COST_MODEL_FORWARDS


def _name(is_fused: bool) -> str:
    return "fused" if is_fused else "serial"


def _setting(seed: int, mode: Mode, split: Split, rounds: int, repeats: int) -> Setting:
    fields = {name: getattr(WORKLOAD, name) for name in type(WORKLOAD).__dataclass_fields__}
    repeated = Repeated(
        **fields,
        before=WORKLOAD,
        after=WORKLOAD,
        num_before=rounds,
        repeats=repeats,
        warm_up=_WARM_UP,
    )
    setting = Setting(mode=mode, workload=repeated, split=split, costs=load_costs(), seed=seed)
    return replace(setting, warm_up=_WARM_UP, steps=rounds * repeats, lending="always")


if __name__ == "__main__":
    main()
