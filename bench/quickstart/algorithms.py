"""`make bench-algorithms`: the quickstart with each algorithm, one after the other.

Nothing but the algorithm differs, and what it cannot do without: a constant length, a reference, a
teacher. The teacher is what the first of them, `dapo`, became. PPO runs twice more, with a critic
of its own and 4 mini-batches x 2 epochs on two ranks: under FSDP, and in a fused pipeline.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from seamflow.inspect.run_files import read_steps

from bench.quickstart import seeds
from bench.quickstart.modes import TARGET, seconds_to
from bench.report import RESULTS, Report
from trainer.config.optimization import ALGORITHMS

_MOST_TOKENS = 300
"""About what a rollout of the quickstart may sample."""
_SEVERAL_UPDATES = {
    "SEAMFLOW_LAUNCHER_TRAINER_RANKS": "2",
    "SEAMFLOW_TRAINER_ALGORITHM__NAME": "ppo",
    "SEAMFLOW_TRAINER_ALGORITHM__NUM_EPOCHS": "2",
    "SEAMFLOW_TRAINER_ALGORITHM__NUM_MINI_BATCHES": "4",
    "SEAMFLOW_TRAINER_CRITIC": "model",
}
_VARIANTS = {
    "ppo_fsdp": _SEVERAL_UPDATES,
    "ppo_pipeline": {**_SEVERAL_UPDATES, "SEAMFLOW_TRAINER_BACKEND": "pipeline"},
}
"""Settings beside those of the algorithm itself, by name."""
_COLUMNS = ("algorithm", "steps", "held-out before", "after", f"seconds to {TARGET:.0%}", "seconds")


def main() -> None:
    """Run, draw, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of a run")
    parser.add_argument("--algorithms", nargs="+", choices=_in_turn(), default=_in_turn())
    arguments = parser.parse_args()
    runs: dict[str, dict[str, Any]] = {}
    start: dict[str, str] = {}  # the first run prepares it
    for name in arguments.algorithms:
        settings = _settings(name, runs) | start
        settings["SEAMFLOW_TRAINER_NUM_STEPS"] = str(arguments.steps)
        runs[name] = seeds.run("multiplexed", arguments.seed, kind=name, environment=settings)
        start = start or seeds.start_of(Path("runs", runs[name]["run"]))
    _print(runs)
    Report(bench="quickstart_algorithms", figures=_figures(runs), seeds=[arguments.seed]).publish()
    _draw(RESULTS / "quickstart_algorithms.png", runs)


def _in_turn() -> list[str]:
    """The teacher's first."""
    return sorted([*ALGORITHMS, *_VARIANTS], key=lambda name: (name != "dapo", name))


def _settings(name: str, runs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    settings = {"SEAMFLOW_TRAINER_ALGORITHM__NAME": name} | _VARIANTS.get(name, {})
    if name == "dr_grpo":
        settings["SEAMFLOW_TRAINER_ALGORITHM__LOSS_LENGTH"] = str(_MOST_TOKENS)
    if name in _REFERENCES:
        if "dapo" not in runs:
            raise SystemExit(f"{name}: it needs a folder of dapo's run, put that before it")
        reference = _REFERENCES[name](Path("runs", runs["dapo"]["run"]))
        settings["SEAMFLOW_LAUNCHER_REFERENCE"] = str(reference.resolve())
    return settings


def _first_weights(run: Path) -> Path:
    return run / "prepared" / "model"


def _newest_weights(run: Path) -> Path:
    return max(marker.parent for marker in (run / "weights").rglob("weight_v*/.complete"))


_REFERENCES = {"distillation": _newest_weights, "dpo": _first_weights, "tba": _first_weights}
"""The frozen model of those that have one: a teacher, or where every run began."""


def _seconds(summary: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """When each step ended, and its success."""
    steps = read_steps(Path("runs", summary["run"], "metrics.jsonl"))
    began = steps[-1]["time"] - summary["seconds_learning"]
    return [step["time"] - began for step in steps], [step["reward/success"] for step in steps]


def _figures(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    found = {
        "least_gain": min(run["heldout_after"] - run["heldout_before"] for run in runs.values())
    }
    for name, run in runs.items():
        for figure in ("heldout_before", "heldout_after", "optimizer_steps", "seconds_learning"):
            found[f"{name}.{figure}"] = float(run[figure])
        found[f"{name}.seconds_to_target"] = seconds_to(TARGET, *_seconds(run))
    return found


def _print(runs: Mapping[str, Mapping[str, Any]]) -> None:
    table = Table(*_COLUMNS, title="The quickstart with each algorithm, on the same cores")
    for name, run in runs.items():
        table.add_row(
            name,
            str(run["optimizer_steps"]),
            f"{run['heldout_before']:.1%}",
            f"{run['heldout_after']:.1%}",
            f"{seconds_to(TARGET, *_seconds(run)):.1f}",
            f"{run['seconds_learning']:.1f}",
        )
    Console().print(table)


def _draw(file: Path, runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Success over optimizer steps, a line for each algorithm."""
    from matplotlib.figure import Figure  # the object interface needs no display

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, (name, run) in enumerate(runs.items()):
        _, success = _seconds(run)
        smooth = [sum(success[max(0, n - 4) : n + 1]) / min(n + 1, 5) for n in range(len(success))]
        axes.plot(
            range(1, len(smooth) + 1),
            smooth,
            color=f"C{number % 10}",
            linestyle="-" if number < 10 else "--",
            label=name,
        )
    axes.set(
        xlabel="optimizer step",
        ylabel="success, mean of 5 steps",
        ylim=(0, 1.02),
        title="The quickstart with each algorithm",
    )
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False, fontsize=8, ncols=2)
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
