"""`python -m bench.pipeline`: six ways to use the same nodes, simulated in virtual time."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.pipeline import pictures
from bench.pipeline.cluster import NodeSeconds
from bench.pipeline.comparison import Row, compare, dispatch, lending_gain, staleness_curve
from bench.pipeline.costs import Costs, load_costs
from bench.pipeline.modes import MODES, Split
from bench.pipeline.simulator import Setting
from bench.pipeline.workloads import Workload, load_workloads
from bench.report import RESULTS, Report

_BOUNDS = range(9)
_LENT = (4, 16)
"""PEARL's nodes: those that only roll out, and those that train."""


def main() -> None:
    """Simulate, draw, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    costs, workloads = load_costs(), load_workloads()
    rows: dict[str, dict[str, Row]] = {}
    with _progress() as progress:
        task = progress.add_task("", total=len(workloads) * (len(MODES) + len(_BOUNDS) + 2))

        def told() -> None:
            progress.advance(task)

        figures: dict[str, float] = {}
        curves = {}
        for name, workload in workloads.items():
            progress.update(task, description=name)
            setting = _setting(workload, costs, arguments.seed)
            rows[name] = compare(setting, arguments.nodes, told)
            multiplexed = rows[name]["multiplexed"].setting
            curves[name] = staleness_curve(multiplexed, _BOUNDS)
            progress.advance(task, len(_BOUNDS))
            fixed, lent = lending_gain(multiplexed, *_LENT)
            figures[f"lending_gain_4_16_{name}"] = (
                lent.rollouts_per_second / fixed.rollouts_per_second
            )
            progress.advance(task, 2)
    for name in workloads:
        _print(name, rows[name])
    figures |= _figures(rows)
    pictures.draw_bins(RESULTS / "pipeline_bins.png", rows)
    pictures.draw_staleness(RESULTS / "pipeline_staleness.png", curves)
    for name in workloads:
        pictures.draw_timeline(RESULTS / f"pipeline_timeline_{name}.png", rows[name])
    for name, results in curves.items():
        for bound, result in results.items():
            figures[f"{name}_idle_at_bound_{bound}"] = (
                result.node_seconds.idle / result.node_seconds.total
            )
    Report(
        bench="pipeline_simulated", figures=figures, seeds=[arguments.seed], packages=("seamflow",)
    ).publish()


def _setting(workload: Workload, costs: Costs, seed: int) -> Setting:
    return Setting(
        mode=MODES["multiplexed"],
        workload=workload,
        split=Split(rollout=0, train=0, both=1),
        costs=costs,
        seed=seed,
        dispatch=dispatch(workload),
    )


def _figures(rows: Mapping[str, Mapping[str, Row]]) -> dict[str, float]:
    """Those of the comparison; the worst workload counts."""
    multiplexed = {name: modes["multiplexed"] for name, modes in rows.items()}
    figures = {
        "multiplexed_idle_share": max(row.idle_share for row in multiplexed.values()),
        "multiplexed_useful_share": min(row.useful_share for row in multiplexed.values()),
        "multiplexed_max_staleness_less_bound": max(
            max(row.result.staleness) - row.setting.bound for row in multiplexed.values()
        ),
        "multiplexed_vs_colocated_single_turn": min(
            _gain(modes, "multiplexed") for name, modes in rows.items() if "single" in name
        ),
        "multiplexed_vs_colocated_agentic": _gain(rows["agentic_64k"], "multiplexed"),
        "streamrl_async_vs_colocated_best": max(
            _gain(modes, "streamrl-async") for modes in rows.values()
        ),
    }
    for name, modes in rows.items():
        for mode, row in modes.items():
            figures[f"{name}.{mode}.rollouts_per_second"] = row.result.rollouts_per_second
            figures[f"{name}.{mode}.useful_share"] = row.useful_share
    return figures


def _gain(modes: Mapping[str, Row], mode: str) -> float:
    baseline = modes["colocated-sync"].result.rollouts_per_second
    return modes[mode].result.rollouts_per_second / baseline


def _print(workload: str, modes: Mapping[str, Row]) -> None:
    bins = [field.name for field in fields(NodeSeconds)]
    columns = ["mode", "rollout", "train", "both", "rollouts/s", "vs colocated"]
    columns += [f"{name.replace('_', ' ')} %" for name in bins] + ["staleness", "steps behind"]
    table = Table(title=workload)
    for column in columns:
        table.add_column(column, justify="right" if column != "mode" else "left")
    for mode, row in modes.items():
        split, result = row.setting.split, row.result
        shares = [
            100 * getattr(result.node_seconds, name) / result.node_seconds.total for name in bins
        ]
        table.add_row(
            mode,
            *(str(number) for number in (split.rollout, split.train, split.both)),
            f"{result.rollouts_per_second:.2f}",
            f"{_gain(modes, mode):.2f}",
            *(f"{share:.1f}" for share in shares),
            _histogram(result.staleness),
            _histogram(result.lag),
        )
    Console(width=180).print(table)


def _histogram(numbers: tuple[int, ...]) -> str:
    counts = Counter(numbers)
    return " ".join(
        f"{number}:{100 * counts[number] / len(numbers):.0f}%" for number in sorted(counts)
    )


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )


if __name__ == "__main__":
    main()
