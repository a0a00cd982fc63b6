"""`make bench-environment`: reasoning-gym's spell_backward learned from configuration alone."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

from bench.report import Report
from tools.provenance import ROOT

CONFIG = "examples/reasoning_gym/spell_backward.toml"
PICTURE = ROOT / "bench" / "results" / "spell_backward.png"


def main() -> None:
    """Train once for each seed; report success and reward on held-out tasks, before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    runs = [run(seed) for seed in seeds]
    raw = _raw(runs)
    figures = {
        name: (max if name.endswith("before") or "seconds" in name else min)(values)
        for name, values in raw.items()
    }
    draw(PICTURE, seeds, runs)
    Report(bench="spell_backward", figures=figures, raw=raw, seeds=seeds).publish()


def run(seed: int) -> list[dict[str, Any]]:
    """One run as a user starts it; its evaluations, each with the `seconds_since_start`."""
    name = f"spell-backward-{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    command = [sys.executable, "-m", "services.launcher", "--config", CONFIG]
    start = time.monotonic()
    subprocess.run([*command, "--name", name, "--seed", str(seed)], check=True, cwd=ROOT)
    lines = (ROOT / "runs" / name / "evaluation.jsonl").read_text().splitlines()
    evaluations = [json.loads(line) for line in lines]
    evaluations[-1]["run_seconds"] = time.monotonic() - start
    return [each for each in evaluations if each["mean"] is not None]


def _raw(runs: Sequence[Sequence[dict[str, Any]]]) -> dict[str, list[float]]:
    """By figure, one value for each run."""
    return {
        "success_before": [lines[0]["pass_at"]["1"] for lines in runs],
        "success_after": [lines[-1]["pass_at"]["1"] for lines in runs],
        "reward_before": [lines[0]["mean"] for lines in runs],
        "reward_after": [lines[-1]["mean"] for lines in runs],
        "optimizer_steps": [float(lines[-1]["step"]) for lines in runs],
        "run_seconds": [lines[-1]["run_seconds"] for lines in runs],
    }


def draw(file: Path, seeds: Sequence[int], runs: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Success (whole line) and mean reward (dashed) on held-out tasks by optimizer step."""
    matplotlib.use("Agg")
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for index, (seed, lines) in enumerate(zip(seeds, runs, strict=True)):
        steps, colour = [line["step"] for line in lines], f"C{index}"
        success = [line["pass_at"]["1"] for line in lines]
        axes.plot(steps, success, "o-", color=colour, label=f"success, seed {seed}")
        rewards = [line["mean"] for line in lines]
        axes.plot(steps, rewards, "o--", color=colour, alpha=0.5, label=f"mean reward, seed {seed}")
    axes.set(xlabel="optimizer step", title="spell_backward, 128 held-out tasks", ylim=(0, 1.02))
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False, ncols=2)
    figure.savefig(file, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
