"""`make bench-pipeline`: six ways to use the same nodes, simulated in virtual time.

Each has the best split of the nodes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.report import RESULTS, Report
from bench.sim import plots
from bench.sim.comparison import Row, compare, dispatch, lending_gain, staleness_curve
from bench.sim.costs import load_costs
from bench.sim.modes import MODES, Split
from bench.sim.simulator.simulation import Result, Setting
from bench.sim.tables import figures, print_rows
from bench.sim.workloads import Workload, load_workloads

_NODES = 16
_BOUNDS = range(9)
_LENT = (4, 16)
"""PEARL's nodes: those that only roll out, and those that train."""


def main() -> None:
    """Simulate, draw, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=_NODES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workload", choices=list(load_workloads()), help="only this one")
    arguments = parser.parse_args()
    workloads = load_workloads()
    if arguments.workload:
        workloads = {arguments.workload: workloads[arguments.workload]}
    folder = RESULTS / ("." if arguments.nodes == _NODES else f"{arguments.nodes}_nodes")
    _simulate(workloads, arguments.nodes, arguments.seed, folder)


def _simulate(workloads: Mapping[str, Workload], nodes: int, seed: int, folder: Path) -> None:
    """Every mode on every workload, with pictures and figures of their own."""
    rows: dict[str, dict[str, Row]] = {}
    curves: dict[str, Mapping[int, Result]] = {}
    more: dict[str, float] = {}
    with _progress(len(workloads) * (len(MODES) + 2)) as told:
        for name, workload in workloads.items():
            rows[name] = compare(_setting(workload, seed), nodes, lambda: told("simulated"))
            multiplexed = rows[name]["multiplexed"].setting
            curves[name] = staleness_curve(multiplexed, _BOUNDS)
            told("simulated")
            fixed, lent = lending_gain(multiplexed, *_LENT)
            more[f"lending_gain_4_16_{name}"] = lent.rollouts_per_second / fixed.rollouts_per_second
            more[f"lending_gain_4_16_{name}_bound"] = 1 / fixed.node_seconds.useful_share
            told("simulated")
    for name in rows:
        print_rows(f"{name}, simulated", rows[name])
    for name, results in curves.items():
        for bound, result in results.items():
            more[f"{name}_idle_at_bound_{bound}"] = result.node_seconds.idle_share
    if len(rows) > 1:
        plots.draw_staleness(folder / "pipeline_staleness.png", curves)
        plots.draw_bins(folder / "pipeline_bins.png", rows)
        _report(folder, "pipeline_simulated", {**figures(rows), **more}, seed)


def _report(folder: Path, bench: str, found: Mapping[str, float], seed: int) -> None:
    Report(bench=bench, figures=found, seeds=[seed], packages=("seamflow",)).publish(folder)


def _setting(workload: Workload, seed: int) -> Setting:
    return Setting(
        mode=MODES["multiplexed"],
        workload=workload,
        split=Split(rollout=0, train=0, both=1),
        costs=load_costs(),
        seed=seed,
        dispatch=dispatch(workload),
    )


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    columns = (TextColumn("{task.description:36}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)
        yield lambda done: progress.update(task, advance=1, description=done)


if __name__ == "__main__":
    main()
