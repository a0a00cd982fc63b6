"""`make bench-model`: the project of `seamflow init --model smollm2`, made and trained.

QUICK=1 makes two steps, shows the figures and writes no result.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from seamflow.cli.run_files import read_steps

from bench.provenance import ROOT
from bench.report import Report

__all__ = ["figures_of", "main"]

_QUICK = ("--set", "trainer.num_steps=2", "--set", "evaluation.every_steps=2")
_SEAMFLOW = (sys.executable, "-P", "-c", "from seamflow.cli.main import main; main()")


def main() -> None:
    """Make the project, train, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two steps, no result")
    quick = parser.parse_args().quick
    project = ROOT / "runs" / f"language-model-{time.strftime('%Y%m%d-%H%M%S')}"
    subprocess.run([*_SEAMFLOW, "init", "--model", "smollm2", str(project)], check=True)
    start = time.monotonic()
    peak_bytes = _train(project, _QUICK if quick else ())
    seconds = time.monotonic() - start
    run = project / "runs" / "sums"
    steps = read_steps(run / "metrics.jsonl")
    figures = figures_of(steps, json.loads((run / "summary.json").read_text(encoding="utf-8")))
    report = Report(
        bench="language_model",
        figures=figures | {"peak_gib": peak_bytes / 2**30, "run_seconds": seconds},
        raw={"reward_mean": [step["reward_mean"] for step in steps]},
        seeds=[0],
    )
    (report.show if quick else report.publish)()


def figures_of(steps: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> dict[str, float]:
    """Success on held-out sums, what a step takes, and how far engine and trainer differ.

    Args:
        steps: of metrics.jsonl, at least one.
        summary: of summary.json.
    """
    return {
        "success_before": summary["heldout_before"],
        "success_after": summary["heldout_after"],
        "optimizer_steps": float(len(steps)),
        "train_seconds_median": median(step["seconds"]["train"] for step in steps),
        "completion_tokens_first": steps[0]["completion_tokens_mean"],
        "completion_tokens_last": steps[-1]["completion_tokens_mean"],
        # Later samples may come from the weights before.
        "logprob_diff_mean": steps[0]["train_rollout_logprob_abs_diff"],
    }


def _train(project: Path, options: Sequence[str]) -> int:
    """Train as a user does; the most memory of all its processes together, in bytes.

    A page that processes share counts once (proportional set size).
    """
    peak = 0
    with subprocess.Popen([*_SEAMFLOW, "train", *options], cwd=project, env=os.environ) as run:
        root = psutil.Process(run.pid)
        while _running(run.poll):
            peak = max(peak, sum(map(_memory, [root, *root.children(recursive=True)])))
    if run.returncode:
        raise SystemExit(f"training ended with {run.returncode}: {project}/runs/sums/logs")
    return peak


def _running(poll: Callable[[], int | None]) -> bool:
    time.sleep(2)
    return poll() is None


def _memory(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.memory_full_info().pss)
    return 0


if __name__ == "__main__":
    main()
