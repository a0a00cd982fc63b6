"""`python -m sim.rlhf`: actor, critic, reference and reward, with and without inter-stage fusion.

The same nodes, seeds and rollouts on the real control plane (RLHFuse, arXiv 2409.13221). Unfused:
all nodes generate a batch, then all of them score it and train. Fused: when the tail begins, as the
scheduler computes, one node goes on with it while the others score and train what is complete.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from itertools import pairwise

from bench.report import Report
from sim.costs import load_costs
from sim.emulation.prompts import Emulation
from sim.emulation.rig import Emulated, emulate
from sim.modes import Split
from sim.simulator.simulation import Setting
from sim.tail_sweep import MODE, WORKLOAD

__all__ = ["WORK", "figures", "step_seconds"]

WORK = (8 + 2 + 8 + 2 + 2 + 2) / 11
"""Of a token, relative to `costs.toml`, for models of equal size: both are trained (8 operations
for each parameter), and the actor's log-probs, values, reference and reward are computed (2)."""
_SPLITS = {
    "unfused": Split(rollout=0, train=0, both=3),
    "fused": Split(rollout=1, train=0, both=2),
}
_WARM_UP = 2
"""Steps before any counts: nothing is measured yet."""


def main() -> None:
    """Run both, one after the other for each seed, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="of a run, the warm-up apart")
    parser.add_argument("--speed", type=float, default=8.0, help="emulated seconds in a second")
    given = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in _SPLITS}
    cores = 0.0
    for seed in range(given.seeds):
        for name in _SPLITS:
            emulated = _run(name, seed, given.steps, given.speed)
            seconds[name] += step_seconds(emulated.result.step_ends)
            cores = max(cores, emulated.control_plane_cores)
    Report(
        bench="rlhf",
        figures=figures(seconds) | {"control_plane_cores": cores},
        raw=seconds,
        seeds=list(range(given.seeds)),
        packages=("seamflow",),
    ).publish()


def step_seconds(step_ends: Sequence[float]) -> list[float]:
    """Seconds of the steps after the warm-up."""
    return [end - begin for begin, end in pairwise(step_ends[_WARM_UP - 1 :])]


def figures(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Samples per second of both, and their ratio."""
    rates = {
        name: len(each) * WORKLOAD.rollouts_per_step / sum(each) for name, each in seconds.items()
    }
    found = {f"{name}.samples_per_second": rate for name, rate in rates.items()}
    return {"fused_vs_unfused": rates["fused"] / rates["unfused"], **found}


def _run(name: str, seed: int, steps: int, speed: float) -> Emulated:
    setting = Setting(
        mode=MODE,
        workload=WORKLOAD,
        split=_SPLITS[name],
        costs=load_costs(),
        seed=seed,
        warm_up=_WARM_UP,
        steps=steps,
        lending="always",
    )
    emulation = Emulation(speed=speed, thinning=16, training_work=WORK)
    at_tail = {"batch__start_at_tail": True} if name == "fused" else {}
    return asyncio.run(emulate(setting, emulation, batch__micro_batch_tokens=256, **at_tail))


if __name__ == "__main__":
    main()
