"""The pictures of a comparison: who did what when, and where all the node-seconds went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
_STEPS_SHOWN = 3


def draw_bins(file: Path, how: str, rows: Mapping[str, Mapping[str, Row]]) -> None:
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
            title=f"{workload.replace('_', ' ')}, {how}",
            xlim=(0, 1.18),
            xlabel="share of node-seconds",
        )
    handles, labels = all_axes[0].get_legend_handles_labels()
    wide = len(rows) > 1
    figure.legend(handles, labels, loc="lower center", ncols=5 if wide else 3, frameon=False)
    figure.tight_layout(rect=(0, 0.08 if wide else 0.15, 1, 1))
    save(figure, file)


def draw_timeline(file: Path, title: str, rows: Mapping[str, Row]) -> None:
    """For each mode the nodes over time, the same seconds for all of them."""
    figure, all_axes = new_figure(11, 1.5 * len(rows) + 0.6, 1, len(rows))
    span = max(_shown(row.result)[1] - _shown(row.result)[0] for row in rows.values())
    for axes, (mode, row) in zip(all_axes, rows.items(), strict=True):
        begin, end = _shown(row.result)
        for place, stretches in enumerate(row.result.stretches.values()):
            _draw_node(axes, place, stretches, begin, end)
        for step_end in row.result.step_ends:
            if begin <= step_end <= end:
                axes.axvline(step_end - begin, color="black", linewidth=0.8)
        axes.set(xlim=(0, span), ylabel="nodes", yticks=[])
        axes.set_title(mode, loc="left", fontsize=9)
    all_axes[-1].set_xlabel("seconds (black: an optimizer step ended)")
    handles = [_patch(name, colour) for name, colour in _COLOURS.items()]
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False)
    figure.suptitle(title)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    save(figure, file)


def _draw_node(
    axes: Any, place: int, stretches: Sequence[tuple[float, str]], begin: float, end: float
) -> None:
    """A row of the timeline between two moments, which begins at 0."""
    ends = [start for start, _ in stretches[1:]] + [end]
    for (start, doing), stop in zip(stretches, ends, strict=True):
        since, until = max(start, begin), min(stop, end)
        if until > since:
            extent = [(since - begin, until - since)]
            axes.broken_barh(extent, (place - 0.5, 1.0), facecolors=_COLOURS[doing])


def _patch(name: str, colour: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=name.replace("_", " "))


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


def _shown(result: Result) -> tuple[float, float]:
    """From the end of one step to the end of a few steps later."""
    last = min(_STEPS_SHOWN + 1, len(result.step_ends) - 1)
    return result.step_ends[max(last - _STEPS_SHOWN, 0)], result.step_ends[last]


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
