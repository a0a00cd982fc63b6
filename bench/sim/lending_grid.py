"""`python -m bench.sim.lending_grid`: what lending brings on many splits, and what its gate costs.

Training nodes that could roll out too are lent never, always, and when the scheduler's gate finds
that it pays; the nodes, the seed and the agents are the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.report import Report
from bench.sim.comparison import dispatch
from bench.sim.costs import load_costs
from bench.sim.modes import MODES, Split
from bench.sim.simulator.simulation import Setting, simulate
from bench.sim.workloads import Workload, load_workloads
from scheduler.policy.allocation_policy import LendingMode

_SPLITS = ((4, 16), (8, 16), (8, 8), (16, 8), (12, 4))
"""Nodes that only roll out, and those that train; the first is the one PEARL gains most on."""
_SCALES = (0.5, 1.0, 2.0)
"""Of the 20k workload's lengths."""
_LENDINGS: tuple[LendingMode, ...] = ("never", "always", "gated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A split and a workload."""

    workload: str
    """Its name."""
    rollout: int
    """Nodes that only roll out."""
    train: int
    """Nodes that train, and could be lent meanwhile."""
    rates: Mapping[LendingMode, float]
    """Rollouts per second by when they are lent."""

    @property
    def name(self) -> str:
        """In figures."""
        return f"{self.workload}.{self.rollout}_{self.train}"

    @property
    def gate_ratio(self) -> float:
        """With the gate, relative to never lending."""
        return self.rates["gated"] / self.rates["never"]

    @property
    def always_gain(self) -> float:
        """Always lending, relative to never lending."""
        return self.rates["always"] / self.rates["never"]

    @property
    def price(self) -> float:
        """Share of the better way's throughput that is lost by having to find out which it is."""
        return 1 - self.rates["gated"] / max(self.rates["never"], self.rates["always"])


def main() -> None:
    """Simulate and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=48, help="that count, after 4 of warm-up")
    arguments = parser.parse_args()
    cases = [(workload, split) for workload in _workloads() for split in _SPLITS]
    cells = []
    with _progress() as progress:
        task = progress.add_task("", total=len(cases))
        for workload, (rollout, train) in cases:
            progress.update(task, description=f"{workload.name} {rollout}/{train}")
            cells.append(
                measure(_setting(workload, arguments.seed, arguments.steps), rollout, train)
            )
            progress.advance(task)
    _print(cells)
    Report(
        bench="pipeline_lending",
        figures=_figures(cells),
        seeds=[arguments.seed],
        packages=("seamflow",),
    ).publish()


def measure(setting: Setting, rollout: int, train: int) -> Cell:
    """The same run three times: lending never, always, and gated."""
    setting = replace(setting, split=Split(rollout=rollout, train=0, both=train))
    return Cell(
        workload=setting.workload.name,
        rollout=rollout,
        train=train,
        rates={
            lending: simulate(replace(setting, lending=lending)).rollouts_per_second
            for lending in _LENDINGS
        },
    )


def scaled(workload: Workload, scale: float) -> Workload:
    """The same agents, whose outputs are `scale` times as long."""
    output = workload.output_tokens
    return replace(
        workload,
        name=f"{workload.name}_x{scale:g}",
        output_tokens=replace(output, median=output.median * scale, most=output.most * scale),
        most_context=round(workload.most_context * max(scale, 1.0)),
    )


def _workloads() -> Iterator[Workload]:
    workloads = load_workloads()
    yield from (scaled(workloads["single_turn_20k"], scale) for scale in _SCALES)
    yield workloads["agentic_64k"]


def _setting(workload: Workload, seed: int, steps: int) -> Setting:
    return Setting(
        mode=MODES["multiplexed"],
        workload=workload,
        split=Split(rollout=1, train=0, both=1),
        costs=load_costs(),
        seed=seed,
        steps=steps,
        dispatch=dispatch(workload),
    )


def _figures(cells: Iterable[Cell]) -> dict[str, float]:
    cells = list(cells)
    few = [cell.always_gain for cell in cells if (cell.rollout, cell.train) == _SPLITS[0]]
    figures = {
        "gate_worst_ratio": min(cell.gate_ratio for cell in cells),
        "gate_worst_price": max(cell.price for cell in cells),
        "always_gain_4_16": min(few),
        "always_gain_4_16_highest": max(few),
    }
    for cell in cells:
        figures[f"{cell.name}.gate_ratio"] = cell.gate_ratio
        figures[f"{cell.name}.always_gain"] = cell.always_gain
    return figures


def _print(cells: Iterable[Cell]) -> None:
    table = Table(title="lending training nodes to generation")
    table.add_column("workload")
    columns = (
        "rollout",
        "train",
        "never/s",
        "always/s",
        "gated/s",
        "always %",
        "gated %",
        "price %",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for cell in cells:
        table.add_row(
            cell.workload,
            str(cell.rollout),
            str(cell.train),
            *(f"{cell.rates[lending]:.2f}" for lending in _LENDINGS),
            f"{100 * (cell.always_gain - 1):+.1f}",
            f"{100 * (cell.gate_ratio - 1):+.1f}",
            f"{100 * cell.price:.1f}",
        )
    Console(width=120).print(table)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )


if __name__ == "__main__":
    main()
