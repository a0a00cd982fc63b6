"""Two pictures: how fast either side trains, and how soon it learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

from bench.quickstart.modes import TARGET, WINDOW, Learning

_COLOURS = ("#4c9be8", "#e58b3a", "#3fae6a", "#b07be0")


def draw_speeds(
    file: Path, speeds: Mapping[str, Mapping[str, Sequence[float]]], runs_of_each: int
) -> None:
    """A bar for each side of each workload: the median of its runs; a line from lowest to highest.

    Args:
        file: PNG to write.
        speeds: tokens per second by workload and side.
        runs_of_each: for the title.
    """
    from matplotlib.figure import Figure  # the object interface needs no display

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    sides = list(dict.fromkeys(side for of_workload in speeds.values() for side in of_workload))
    for number, side in enumerate(sides):
        samples = [of_workload[side] for of_workload in speeds.values()]
        heights = [median(each) for each in samples]
        spread = [
            [height - min(each) for height, each in zip(heights, samples, strict=True)],
            [max(each) - height for height, each in zip(heights, samples, strict=True)],
        ]
        places = [place + 0.4 * number for place in range(len(samples))]
        colour = _COLOURS[number]
        axes.bar(places, heights, 0.38, yerr=spread, capsize=3, color=colour, label=side)
    axes.set_xticks([place + 0.2 * (len(sides) - 1) for place in range(len(speeds))], list(speeds))
    axes.set(ylabel="trained tokens per second", title=f"Same cores, {runs_of_each} runs of each")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=120)


def draw_learning(file: Path, runs: Mapping[str, Sequence[Learning]], title: str) -> None:
    """Success over seconds, a line for each run of each side.

    Args:
        file: PNG to write.
        runs: by what the legend calls them.
        title: above it.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for colour, (name, many) in zip(_COLOURS, runs.items(), strict=False):
        for number, each in enumerate(many):
            ends = range(WINDOW, len(each.success) + 1)
            smooth = [fmean(each.success[end - WINDOW : end]) for end in ends]
            label = name if number == 0 else None
            axes.plot(each.seconds[WINDOW - 1 :], smooth, color=colour, alpha=0.8, label=label)
    axes.axhline(TARGET, color="black", linewidth=0.6, linestyle="--")
    axes.set(
        xlabel="seconds of training",
        ylabel=f"success, mean of {WINDOW} steps",
        ylim=(0, 1.02),
        title=title,
    )
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(file, dpi=120)
