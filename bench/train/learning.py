"""Seconds until the quickstart's task is learned: the quickstart itself, and TRL on its files.

TRL gets the model folder and the training tasks that a run of ours with the same seed was given,
the same reward, both turns of a task in one rollout (`bench.train.conversation`), the same number
of steps and the same learning rates to choose from. Each side is compared at its own best rate.

What counts is success on training tasks, as in `bench.quickstart.modes`. Either clock starts when
everything is loaded: ours with the first task that is handed out, to half a second, TRL's with
`train`.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median

from seamflow.inspect.run_files import read_steps

from bench.quickstart import seeds
from bench.quickstart.modes import Learning, learning
from bench.report import ratios
from bench.train.sides import ROOT, read_config
from bench.train.throughput import OURS, TRL
from bench.train.trl import trl_command, trl_environment

MIN_SEEDS = 3
_MAX_NEW_TOKENS = 96
"""Of a turn, as the quickstart's agent asks for."""

Runs = Mapping[float, Sequence[Learning]]
"""Of one side: a run for each seed, by learning rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to measure."""

    with_trl: bool
    """Whether TRL takes its turns."""
    seeds: Sequence[int]
    """Of everything, one run of each side and rate for each."""
    rates: Sequence[float]
    """Learning rates, which fall linearly to 0."""
    steps: int
    """Optimizer steps of a run."""
    mode: str
    """Of the quickstart."""
    cores: int
    """Torch threads of TRL."""


def measure(options: Options, report: Callable[[str], None]) -> Mapping[str, Runs]:
    """Run both sides with every rate and seed; returns the runs by side."""
    runs: dict[str, dict[float, list[Learning]]] = {}
    for seed in options.seeds:
        start = Path()
        for number, rate in enumerate(options.rates):
            # The first run of a seed makes the model, so it is ours; then neither is always second.
            for side in (OURS, TRL) if number % 2 == 0 else (TRL, OURS):
                if side == OURS:
                    found, start = _ours(options, rate, seed)
                elif options.with_trl:
                    found = _trl(options, rate, seed, start)
                else:
                    continue
                runs.setdefault(side, {}).setdefault(rate, []).append(found)
                report(f"{side}, rate {rate:g}, seed {seed}")
    return runs


def best_rate(runs: Runs) -> float:
    """The rate at which most seeds reached the target, and of those the soonest by their median."""

    def rank(rate: float) -> tuple[int, float]:
        reached = [each.to_target for each in runs[rate] if each.to_target >= 0]
        return -len(reached), median(reached) if reached else inf

    return min(runs, key=rank)


def figures(runs: Mapping[str, Runs]) -> dict[str, float]:
    """TRL's seconds over ours, seed by seed, each side at its best rate; and what both took."""
    rates = {side: best_rate(of_side) for side, of_side in runs.items()}
    best = {side: runs[side][rate] for side, rate in rates.items()}
    found: dict[str, float] = {}
    if TRL in best:
        pairs = _that_reached(best[OURS], best[TRL])
        found["pairs_that_reached_the_target"] = float(len(pairs))
        if len(pairs) >= MIN_SEEDS:
            ours, theirs = zip(*pairs, strict=True)
            found |= ratios("seconds_to_target_vs_trl", theirs, ours, least=MIN_SEEDS)
    for side, of_side in best.items():
        found[f"{side}.learning_rate"] = rates[side]
        reached = [each.to_target for each in of_side if each.to_target >= 0]
        found[f"{side}.seeds_that_reached_the_target"] = float(len(reached))
        found[f"{side}.seconds_to_target"] = median(reached) if reached else -1.0
        found[f"{side}.seconds_of_a_run"] = median(each.seconds[-1] for each in of_side)
    return found


def raw(runs: Mapping[str, Runs]) -> dict[str, list[float]]:
    """Seconds to the target of every run, in the order of the seeds; -1: it was not reached."""
    return {
        f"{side}.rate_{rate:g}.seconds_to_target": [each.to_target for each in of_rate]
        for side, of_side in runs.items()
        for rate, of_rate in of_side.items()
    }


def _that_reached(
    ours: Sequence[Learning], theirs: Sequence[Learning]
) -> list[tuple[float, float]]:
    pairs = [(a.to_target, b.to_target) for a, b in zip(ours, theirs, strict=True)]
    return [pair for pair in pairs if min(pair) >= 0]


def _ours(options: Options, rate: float, seed: int) -> tuple[Learning, Path]:
    """The quickstart; how it went, and the folder with what it began from."""
    settings = {
        "SEAMFLOW_TRAINER_OPTIMIZER__LEARNING_RATE": str(rate),
        "SEAMFLOW_TRAINER_NUM_STEPS": str(options.steps),
    }
    summary = seeds.run(options.mode, seed, kind=f"bench-train-{rate:g}", environment=settings)
    return learning(summary), Path("runs", summary["run"], "prepared").resolve()


def _trl(options: Options, rate: float, seed: int, start: Path) -> Learning:
    """TRL from the same start; its clock runs from `train`, when model and tasks are loaded."""
    rules = read_config(f"examples/quickstart/{options.mode}.toml")
    with tempfile.TemporaryDirectory(prefix="seamflow-bench-train-") as folder:
        metrics = Path(folder, "metrics.jsonl")
        command = trl_command(
            rules,
            task="lift",
            model=start / "model",
            tasks=start / "tasks-train.jsonl",
            metrics=metrics,
            max_new_tokens=_MAX_NEW_TOKENS,
            steps=options.steps,
            learning_rate=rate,
            schedule=rules["trainer"]["learning_rate_schedule"],
            threads=options.cores,
            seed=seed,
        )
        environment = trl_environment(options.cores)
        subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
        begin, *steps = read_steps(metrics)
    return Learning(
        seconds=[step["time"] - begin["time"] for step in steps],
        success=[step["success"] for step in steps],
        nodes={},
    )
