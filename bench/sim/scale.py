"""`python -m bench.sim.scale`: how long it takes to simulate a large cluster for an hour."""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import replace

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from bench.report import Report
from bench.sim.costs import load_costs
from bench.sim.modes import MODES, Split
from bench.sim.simulator.simulation import Result, Setting, simulate
from bench.sim.workloads import load_workloads

_WORKLOAD = "single_turn_20k"
_UNIT = 16
"""Nodes that the workload's batch is made for: more nodes train on more groups at a time."""
_DEDICATED = 5 / 16
"""Share of the nodes that only roll out."""


def main() -> None:
    """Simulate and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    large = setting(arguments.nodes, 3600 * arguments.hours, arguments.seed)
    began, cpu = time.perf_counter(), time.process_time()
    result = _simulated(large)
    figures = {
        f"simulated_seconds_{arguments.nodes}_nodes": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        "hours": result.step_ends[-1] / 3600,
        "steps": len(result.step_ends),
        "rollouts": result.rollouts,
        "rollouts_per_second_per_node": result.rollouts_per_second / arguments.nodes,
        "idle_share": result.node_seconds.idle_share,
    }
    Report(
        bench="pipeline_scale", figures=figures, seeds=[arguments.seed], packages=("seamflow",)
    ).publish()


def setting(nodes: int, seconds: float, seed: int) -> Setting:
    """`nodes` multiplexed nodes for so long, with batches in proportion."""
    workload = load_workloads()[_WORKLOAD]
    groups = max(workload.groups_per_step * nodes // _UNIT, 1)
    dedicated = max(round(_DEDICATED * nodes), 1)
    return Setting(
        mode=MODES["multiplexed"],
        workload=replace(workload, groups_per_step=groups),
        split=Split(rollout=dedicated, train=0, both=nodes - dedicated),
        costs=load_costs(),
        seed=seed,
        warm_up=1,
        steps=1,
        least_seconds=seconds,
    )


def _simulated(large: Setting) -> Result:
    gc.set_threshold(200_000, 20, 100)  # hundreds of thousands of agents, and hardly a cycle
    with Progress(
        TextColumn("simulated"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    ) as progress:
        task = progress.add_task("", total=large.least_seconds)
        return simulate(large, lambda now: progress.update(task, completed=now))


if __name__ == "__main__":
    main()
