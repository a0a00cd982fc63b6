"""`python -m bench.sim`: six ways to use the same nodes, on the real control plane.

First all are simulated in virtual time, which finds the best split of the nodes for each. Then each
runs again, on emulated nodes behind the real services; the two must agree. With `--simulated` the
second part is left out.
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
from bench.sim.emulation.emulated_comparison import MOST_CORES, Pair, kept, shortened
from bench.sim.modes import MODES, Split
from bench.sim.simulator.simulation import Result, Setting
from bench.sim.tables import figures, print_rows
from bench.sim.workloads import Workload, load_workloads

_NODES = 16
_BOUNDS = range(9)
_LENT = (4, 16)
"""PEARL's nodes: those that only roll out, and those that train."""


def main() -> None:
    """Simulate, emulate, draw, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=_NODES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--simulated", action="store_true", help="in virtual time only")
    parser.add_argument("--workload", choices=list(load_workloads()), help="only this one")
    parser.add_argument(
        "--resume",
        type=Path,
        help="folder that keeps emulated runs, for the same code to go on from",
    )
    arguments = parser.parse_args()
    workloads = load_workloads()
    if arguments.workload:
        workloads = {arguments.workload: workloads[arguments.workload]}
    folder = RESULTS / ("." if arguments.nodes == _NODES else f"{arguments.nodes}_nodes")
    rows = _simulate(workloads, arguments.nodes, arguments.seed, folder)
    if not arguments.simulated:
        _emulate(rows, arguments.seed, folder, arguments.resume)


def _simulate(
    workloads: Mapping[str, Workload], nodes: int, seed: int, folder: Path
) -> dict[str, dict[str, Row]]:
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
        plots.draw_bins(folder / "pipeline_bins.png", "simulated", rows)
        for name in rows:
            _draw_timeline(folder, name, rows[name], "simulated")
        _report(folder, "pipeline_simulated", {**figures(rows), **more}, seed)
    return rows


def _emulate(
    simulated: Mapping[str, Mapping[str, Row]], seed: int, folder: Path, resume: Path | None
) -> None:
    """The same modes with the same splits on the real control plane, and how the two agree."""
    rows: dict[str, dict[str, Row]] = {}
    pairs: list[Pair] = []
    with _progress(sum(map(len, simulated.values()))) as told:
        for name, modes in simulated.items():
            of_workload: dict[str, Pair] = {}
            for mode, row in modes.items():
                of_workload[mode] = kept(resume, shortened(row.setting))
                told(f"{name} {mode}")
            _print_pairs(name, of_workload)
            _require_valid(name, of_workload)
            rows[name] = {mode: each.emulated for mode, each in of_workload.items()}
            pairs += of_workload.values()
            file = folder / f"pipeline_bins_{name}.png"
            plots.draw_bins(file, "emulated", {name: rows[name]})
            _draw_timeline(folder, name, rows[name], "emulated")
            found = {**figures({name: rows[name]}), **_agreement(list(of_workload.values()))}
            _report(folder, f"pipeline_{name}", found, seed)
    if len(rows) > 1:
        _report(folder, "pipeline", {**figures(rows), **_agreement(pairs)}, seed)


def _draw_timeline(folder: Path, workload: str, rows: Mapping[str, Row], how: str) -> None:
    file = folder / f"pipeline_timeline_{workload}.png"
    plots.draw_timeline(file, f"{workload}, {how}", rows)


def _require_valid(workload: str, pairs: Mapping[str, Pair]) -> None:
    if invalid := [mode for mode, each in pairs.items() if not each.is_valid]:
        raise SystemExit(
            f"{workload}: {', '.join(invalid)}: invalid, the control plane took more than "
            f"{MOST_CORES} cores; run again on a quiet machine"
        )


def _print_pairs(workload: str, pairs: Mapping[str, Pair]) -> None:
    cores = {
        mode: f"{each.control_plane_cores:.2f}{'' if each.is_valid else ' INVALID'}"
        for mode, each in pairs.items()
    }
    more = {
        "simulated %": {mode: f"{100 * each.deviation:+.1f}" for mode, each in pairs.items()},
        "cores": cores,
        "speed": {mode: f"{each.speed:.2f}" for mode, each in pairs.items()},
    }
    print_rows(f"{workload}, emulated", {mode: each.emulated for mode, each in pairs.items()}, more)


def _agreement(pairs: list[Pair]) -> dict[str, float]:
    """How far the simulator is from the emulation, and what the control plane took at most."""
    return {
        "simulated_vs_emulated_worst": max((each.deviation for each in pairs), key=abs),
        "control_plane_cores_most": max(each.control_plane_cores for each in pairs),
        "control_plane_cores_at_real_time_most": max(
            each.control_plane_cores / each.speed for each in pairs
        ),
    }


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
