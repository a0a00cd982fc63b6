"""`make bench-quickstart`: three seeds of the quickstart, and one run with shuffled rewards."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.report import Report

FIGURES = (
    "heldout_before",
    "heldout_after",
    "optimizer_steps",
    "weight_updates",
    "turns_interrupted",
    "turns_resumed",
    "tokens_recorded",
    "tokens_lost",
    "tokens_duplicated",
    "node_lendings",
    "node_returns",
    "max_staleness_seen",
    "infrastructure_failures",
    "seconds_total",
)
# Over several runs a figure is reported at its worst.
WORST_IS_SMALL = frozenset(
    {"heldout_after", "optimizer_steps", "weight_updates", "turns_interrupted", "turns_resumed",
     "tokens_recorded", "node_lendings", "node_returns"}
)  # fmt: skip


def main() -> None:
    """Run, and report each figure at its worst over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    runs = [run("multiplexed", seed) for seed in seeds]
    control = run("multiplexed", seeds[0], shuffled=True)
    raw = {name: [float(summary[name]) for summary in runs] for name in FIGURES}
    raw["tail_ratio_per_turn_before"] = [r["tail_ratio"]["before"]["per_turn"] for r in runs]
    raw["tail_ratio_per_turn_after"] = [r["tail_ratio"]["after"]["per_turn"] for r in runs]
    raw["shuffled_gain"] = [control["heldout_after"] - control["heldout_before"]]
    figures = {name: _worst(name, samples) for name, samples in raw.items()}
    Report(bench="quickstart", figures=figures, raw=raw, seeds=seeds).publish()


def run(
    mode: str,
    seed: int,
    *,
    shuffled: bool = False,
    kind: str | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """One quickstart as a user starts it, in one of its modes; its summary.

    Args:
        mode: names its file.
        seed: of everything.
        shuffled: as a control, with rewards that mean nothing.
        kind: names its folder.
        environment: settings, as SEAMFLOW_<TABLE>_<NAME>.
    """
    kind = kind or ("shuffled" if shuffled else f"bench-{mode}")
    name = f"{kind}-{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    config = f"examples/quickstart/{mode}.toml"
    arguments = ["--config", config, "--name", name, "--seed", str(seed)]
    command = [sys.executable, "-m", "services.launcher", *arguments]
    extra = {"SEAMFLOW_TRAINER_ALGORITHM__SHUFFLE_REWARDS": "true"} if shuffled else {}
    subprocess.run(command, env={**os.environ, **extra, **environment}, check=True)
    summary: dict[str, Any] = json.loads(Path("runs", name, "summary.json").read_text())
    return summary


def start_of(run: Path) -> dict[str, str]:
    """Settings of a run that starts with the model and tasks which `run` prepared."""
    prepared = run.resolve() / "prepared"
    return {
        "SEAMFLOW_LAUNCHER_PREPARE": "",
        "SEAMFLOW_LAUNCHER_MODEL": str(prepared / "model"),
        "SEAMFLOW_LAUNCHER_TASKS": str(prepared / "tasks-train.jsonl"),
        "SEAMFLOW_LAUNCHER_HELDOUT_TASKS": str(prepared / "tasks-heldout.jsonl"),
    }


def _worst(name: str, samples: list[float]) -> float:
    return min(samples) if name in WORST_IS_SMALL or name.startswith("tail") else max(samples)


if __name__ == "__main__":
    main()
