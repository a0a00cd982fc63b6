"""`make bench-modes`: the quickstart multiplexed and disaggregated, on the same cores.

Nothing is emulated: its two nodes, in turn in either mode, seed by seed. What counts is how long a
run learned until it first succeeded at `TARGET` of its training tasks.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from seamflow.inspect.run_files import read_steps

from bench.report import RESULTS, Report

TARGET = 0.8
"""Share of training rollouts that succeed."""
WINDOW = 5
"""Optimizer steps that a success rate is the mean of."""
MODES = ("multiplexed", "disaggregated")
_COLOURS = {"multiplexed": "#b07be0", "disaggregated": "#4c9be8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """One run."""

    seconds: Sequence[float]
    """From the start of the dataloader to the end of each optimizer step, to half a second."""
    success: Sequence[float]
    """Of each step's rollouts."""
    nodes: Mapping[str, Mapping[str, Any]]
    """The summary's shares of each node."""

    @property
    def to_target(self) -> float:
        """Seconds until `TARGET`."""
        return seconds_to(TARGET, self.seconds, self.success)


def main() -> None:
    """Run, draw, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    runs: dict[str, list[Learning]] = {mode: [] for mode in MODES}
    for seed in seeds:
        # The second run of a pair begins on a warmer machine: neither mode is always second.
        for mode in MODES if seed % 2 == 0 else reversed(MODES):
            runs[mode].append(learning(seeds.run(mode, seed)))
    Report(bench="quickstart_modes", figures=_figures(runs), raw=_raw(runs), seeds=seeds).publish()
    _draw(RESULTS / "quickstart_modes.png", runs)


def seconds_to(target: float, seconds: Sequence[float], success: Sequence[float]) -> float:
    """When the mean of `WINDOW` steps first reached `target`; -1: never."""
    for end in range(WINDOW, len(success) + 1):
        if fmean(success[end - WINDOW : end]) >= target:
            return seconds[end - 1]
    return -1.0


def learning(summary: Mapping[str, Any]) -> Learning:
    """How a run of the quickstart went, by its summary and its metrics."""
    steps = read_steps(Path("runs", summary["run"], "metrics.jsonl"))
    began = steps[-1]["time"] - summary["seconds_learning"]
    return Learning(
        seconds=[step["time"] - began for step in steps],
        success=[step["reward/success"] for step in steps],
        nodes=summary["nodes"],
    )


def _figures(runs: Mapping[str, Sequence[Learning]]) -> dict[str, float]:
    """Medians over the seeds with which both modes reached the target; shares are means."""
    pairs = [
        (ours.to_target, theirs.to_target)
        for ours, theirs in zip(runs["multiplexed"], runs["disaggregated"], strict=True)
        if min(ours.to_target, theirs.to_target) >= 0
    ]
    found = {"pairs_that_reached_the_target": float(len(pairs))}
    if pairs:
        gains = [theirs / ours for ours, theirs in pairs]
        found["disaggregated_vs_multiplexed_seconds_to_target"] = median(gains)
        found["multiplexed.seconds_to_target"] = median(ours for ours, _ in pairs)
        found["disaggregated.seconds_to_target"] = median(theirs for _, theirs in pairs)
    for mode, many in runs.items():
        found[f"{mode}.seconds_learning"] = median(each.seconds[-1] for each in many)
        found |= {f"{mode}.{name}": value for name, value in _of_nodes(many).items()}
    return found


def _of_nodes(runs: Sequence[Learning]) -> dict[str, float]:
    """Means of the runs' measurements of each node."""
    found: dict[str, list[float]] = {}
    for name, node in (item for run in runs for item in run.nodes.items()):
        found.setdefault(f"{name}.idle_share", []).append(node["idle"])
        for tag, seconds in node["switch_seconds"].items():
            found.setdefault(f"{name}.switch_seconds_{tag or 'none'}", []).append(seconds)
    return {name: fmean(values) for name, values in found.items()}


def _raw(runs: Mapping[str, Sequence[Learning]]) -> dict[str, list[float]]:
    return {
        f"{mode}.seconds_to_target": [each.to_target for each in many]
        for mode, many in runs.items()
    }


def _draw(file: Path, runs: Mapping[str, Sequence[Learning]]) -> None:
    """Success over seconds, a line for each run."""
    from matplotlib.figure import Figure  # the object interface needs no display

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for mode, many in runs.items():
        for number, each in enumerate(many):
            ends = range(WINDOW, len(each.success) + 1)
            smooth = [fmean(each.success[end - WINDOW : end]) for end in ends]
            label = mode if number == 0 else None
            seconds = each.seconds[WINDOW - 1 :]
            axes.plot(seconds, smooth, color=_COLOURS[mode], alpha=0.8, label=label)
    axes.axhline(TARGET, color="black", linewidth=0.6, linestyle="--")
    axes.set(
        xlabel="seconds of learning",
        ylabel=f"success, mean of {WINDOW} steps",
        ylim=(0, 1.02),
        title="The quickstart in two modes, on the same cores",
    )
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
