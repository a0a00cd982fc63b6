"""Success on held-out tasks by optimizer step, a line for each run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.language_model.watched_run import WatchedRun


def draw_held_out(
    file: Path, runs: Mapping[str, WatchedRun], controls: Mapping[str, WatchedRun]
) -> None:
    """Write a PNG: lines with 95 % intervals of `runs`, dashed grey ones of `controls`.

    Args:
        file: to write.
        runs: by the name in the legend.
        controls: that should learn nothing.
    """
    from matplotlib.figure import Figure  # the object interface needs no display

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for number, (name, run) in enumerate({**runs, **controls}.items()):
        lines, is_control = run.evaluations, name in controls
        steps, means = [line["step"] for line in lines], [line["mean"] for line in lines]
        colour = "#888888" if is_control else f"C{number}"
        style = "o--" if is_control else "o-"
        axes.plot(steps, means, style, color=colour, label=name, markersize=4)
        low, high = zip(*(line["interval"] for line in lines), strict=True)
        axes.fill_between(steps, low, high, color=colour, alpha=0.08, linewidth=0)
    tasks = next(iter(runs.values())).evaluations[0]["num_tasks"]
    axes.set(
        xlabel="optimizer step",
        ylabel=f"success on {tasks} held-out sums",
        title="SmolLM2-135M-Instruct, two CPU cores",
        ylim=(0, 1.02),
    )
    axes.grid(alpha=0.25)
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(file, dpi=120)
