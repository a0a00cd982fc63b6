"""The pictures of a comparison: where all the node-seconds went."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.sim.comparison import Row
from bench.sim.simulator.simulation import Result

_COLOURS = {
    "generation": "#4c9be8",
    "training": "#3fae6a",
    "switching": "#f2c14e",
    "repeated_prefill": "#e58b3a",
    "idle": "#d9d9d9",
}


def draw_bins(file: Path, rows: Mapping[str, Mapping[str, Row]]) -> None:
    """For each workload a bar per mode: shares of node-seconds, and throughput at its end."""
    figure, all_axes = new_figure(5.2 * len(rows), 3.6, len(rows))
    for axes, (workload, modes) in zip(all_axes, rows.items(), strict=True):
        for place, row in enumerate(modes.values()):
            left, seconds = 0.0, row.result.node_seconds
            for name, colour in _COLOURS.items():
                share = getattr(seconds, name) / seconds.total
                label = name.replace("_", " ") if place == 0 else None
                axes.barh(place, share, left=left, color=colour, height=0.7, label=label)
                left += share
            rate = f" {row.result.rollouts_per_second:.2f}/s"
            axes.text(1.0, place, rate, va="center", fontsize=8)
        axes.set_yticks(range(len(modes)), list(modes))
        axes.invert_yaxis()
        axes.set(
            title=f"{workload.replace('_', ' ')}, simulated",
            xlim=(0, 1.18),
            xlabel="share of node-seconds",
        )
    handles, labels = all_axes[0].get_legend_handles_labels()
    wide = len(rows) > 1
    figure.legend(handles, labels, loc="lower center", ncols=5 if wide else 3, frameon=False)
    figure.tight_layout(rect=(0, 0.08 if wide else 0.15, 1, 1))
    save(figure, file)


def draw_staleness(file: Path, curves: Mapping[str, Mapping[int, Result]]) -> None:
    """Idle share against the bound on staleness."""
    figure, (axes,) = new_figure(6, 3.6, 1)
    for workload, results in curves.items():
        idle = [result.node_seconds.idle_share for result in results.values()]
        axes.plot(list(results), idle, "o-", label=workload.replace("_", " "))
    axes.set(xlabel="bound on staleness, in weight versions", ylabel="idle share of node-seconds")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.tight_layout()
    save(figure, file)


def new_figure(width: float, height: float, columns: int, rows: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110)
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def save(figure: Any, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
