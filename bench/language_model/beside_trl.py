"""Seconds until sums are learned, beside TRL's `GRPOTrainer` on the same model and tasks.

Either side has the same number of answers in a step, the same learning rate and the same two cores,
in turn. Not like for like: ours trains on samples up to one version old, TRL on its own alone. What
counts is success on training tasks, the mean of `WINDOW` steps. Either clock starts when all is
loaded.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from seamflow.inspect.run_files import read_steps

from bench.baselines.environments import installed, interpreter
from bench.language_model.watched_run import make_project, train, watch
from bench.quickstart.modes import Learning
from bench.report import RESULTS, Report, ratios
from bench.train.pictures import draw_learning
from bench.train.trl import PEER, trl_command, trl_environment
from tools.provenance import ROOT

_CORES = 2
_SIDES = ("seamflow", "trl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One run of a side."""

    learning: Learning
    """How it learned."""
    tokens_per_second: float
    """Sampled tokens that were trained on, over the seconds of all steps."""
    peak_bytes: int
    """Of all its processes together."""
    services_cpu_share: float = 0.0
    """Of its CPU seconds; TRL has no services."""


def measure(seeds: Sequence[int]) -> None:
    """Train both sides in turn, once for each seed; draw and publish."""
    interpreter(PEER)  # made now, and not within the first turn
    project = make_project("beside-trl")
    runs: dict[str, list[Side]] = {side: [] for side in _SIDES}
    for number, seed in enumerate(seeds):
        for side in _SIDES if number % 2 == 0 else reversed(_SIDES):
            of_side = _ours if side == "seamflow" else _trl
            runs[side].append(of_side(project, seed))
    drawn = {side: [each.learning for each in of_side] for side, of_side in runs.items()}
    draw_learning(RESULTS / "language_model_trl.png", drawn, "SmolLM2-135M-Instruct, sums")
    versions = installed(interpreter(PEER), "trl", "torch", "transformers", "accelerate")
    Report(
        bench="language_model_trl",
        figures=_figures(runs),
        raw=_raw(runs),
        seeds=seeds,
        peers={PEER: versions},
    ).publish()


def _ours(project: Path, seed: int) -> Side:
    settings = {
        "launcher.seed": seed,
        "evaluation.every_steps": 0,
    }
    run = train(project, f"seed-{seed}", settings)
    began = run.steps[-1]["time"] - run.summary["seconds_learning"]
    side = _side(run.steps, "reward_mean", began, run.peak_bytes)
    return replace(side, services_cpu_share=run.services_cpu_share)


def _trl(project: Path, seed: int) -> Side:
    rules = tomllib.loads((project / "train.toml").read_text(encoding="utf-8"))
    metrics = project / "runs" / f"trl-{seed}.jsonl"
    optimizer = rules["trainer"]["optimizer"]
    command = trl_command(
        rules,
        task="answers",
        prompt=rules["tool_loop"]["prompt"],
        model=rules["launcher"]["model"],
        tasks=project / rules["launcher"]["tasks"],
        metrics=metrics,
        max_new_tokens=rules["environments"]["max_new_tokens"],
        steps=rules["trainer"]["num_steps"],
        learning_rate=optimizer["learning_rate"],
        warmup_steps=optimizer["warmup_steps"],
        schedule="constant",
        threads=_CORES,
        seed=seed,
    )
    peak, _, code = watch(command, ROOT, trl_environment(_CORES))
    if code:
        raise SystemExit(f"TRL ended with {code}")
    begin, *lines = read_steps(metrics)
    return _side(lines, "success", begin["time"], peak)


def _side(lines: Sequence[Mapping[str, Any]], success: str, began: float, peak: int) -> Side:
    learning = Learning(
        seconds=[line["time"] - began for line in lines],
        success=[line[success] for line in lines],
        nodes={},
    )
    tokens = sum(line["num_tokens"] for line in lines)
    rate = tokens / learning.seconds[-1]
    return Side(learning=learning, tokens_per_second=rate, peak_bytes=peak)


def _figures(runs: Mapping[str, Sequence[Side]]) -> dict[str, float]:
    ours, theirs = (runs[side] for side in _SIDES)
    least = len(ours)
    found = ratios(
        "tokens_per_second_vs_trl",
        [each.tokens_per_second for each in ours],
        [each.tokens_per_second for each in theirs],
        least,
    )
    times = [
        (b.learning.to_target, a.learning.to_target) for a, b in zip(ours, theirs, strict=True)
    ]
    reached = [pair for pair in times if min(pair) >= 0]
    found["pairs_that_reached_the_target"] = float(len(reached))
    if reached:
        of_trl, of_ours = zip(*reached, strict=True)
        found |= ratios("seconds_to_target_vs_trl", of_trl, of_ours, len(reached))
    found["services_cpu_share"] = max(each.services_cpu_share for each in ours)
    for side, of_side in runs.items():
        found[f"{side}.peak_gib"] = max(each.peak_bytes for each in of_side) / 2**30
        found[f"{side}.seconds_of_a_run"] = median(each.learning.seconds[-1] for each in of_side)
    return found


def _raw(runs: Mapping[str, Sequence[Side]]) -> dict[str, list[float]]:
    raw: dict[str, list[float]] = {}
    for side, of_side in runs.items():
        raw[f"{side}.seconds_to_target"] = [each.learning.to_target for each in of_side]
        raw[f"{side}.tokens_per_second"] = [each.tokens_per_second for each in of_side]
        for number, each in enumerate(of_side):
            raw[f"{side}.{number}.success"] = list(each.learning.success)
    return raw
